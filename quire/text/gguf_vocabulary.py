"""A tokenizer rebuilt from the metadata of a GGUF file, which carries a vocabulary but no `tokenizer.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.text.split_rules import SplitRule, split_rule

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "▁"  # SentencePiece's spelling of a space

# The names chat templates know them by.
_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format's spelling
    "mask_token": "mask_token_id",
}
# Nothing here needs these. Files of models without one may have -1, as 4294967295, in its place.
_UNUSED_NAMES = ("pad_token", "sep_token", "mask_token")


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer that `tokenizer.ggml.*` describes, and its special tokens by name (`bos_token`, ...)."""
    kind = _required(metadata, "model", str)
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(_listed(metadata, "tokens", str))]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise InvalidCheckpoint(
            f"tokenizer.ggml.tokens: {twice!r} has two ids, {tokens.index(twice)} and {vocab[twice]}"
        )
    has_types = bool(metadata.get("tokenizer.ggml.token_type"))
    types = _listed(metadata, "token_type", int) if has_types else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InvalidCheckpoint(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")

    special_tokens = _special_tokens(metadata, tokens)
    if kind == "gpt2":
        rule = split_rule(_required({"tokenizer.ggml.pre": "default", **metadata}, "pre", str))
        backend = _byte_level(metadata, vocab, rule)
        adds_bos, respelled = rule.adds_bos, False
    elif kind == "llama":
        backend = _sentence_piece(metadata, tokens, vocab, types, special_tokens.get("unk_token"))
        # With no prefix to get in the way, runs of spaces are found as SentencePiece finds them: after respelling.
        adds_bos, respelled = True, not metadata.get("tokenizer.ggml.add_space_prefix", True)
    else:
        raise UnsupportedModel(f"tokenizer.ggml.model: {kind!r} is not supported; supported are gpt2, llama")

    _add_tokens(backend, tokens, types, special_tokens, respelled)
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    surround(
        backend,
        special_tokens.get("bos_token") if adds_bos else None,
        special_tokens.get("eos_token") if adds_eos else None,
    )
    return backend, special_tokens


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encoding begin with `bos` and end with `eos`, where given, and add nothing else."""
    ends = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(token, _id_of(backend, token)) for token in dict.fromkeys(ends)],
    )


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id: int | None = backend.token_to_id(token)
    if token_id is None:
        raise InvalidCheckpoint(f"tokenizer: {token!r} begins or ends every prompt but is not in the vocabulary")
    return token_id


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], rule: SplitRule) -> tokenizers.Tokenizer:
    merges = []
    for merge in _listed(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InvalidCheckpoint(f"tokenizer.ggml.merges: {merge!r} joins what tokenizer.ggml.tokens does not hold")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words_first))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)), use_regex=False
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], vocab: dict[str, int], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedModel(f"tokenizer.ggml.{key} is not supported with tokenizer.ggml.model 'llama'")
    scores = _listed(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise InvalidCheckpoint(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_of(tokens, vocab, types, scores),
            byte_fallback=has_bytes,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    # The prefix is added to every stretch between special tokens, as SentencePiece does when called on each of them.
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1, right=0)] if prefixed else []),
        ]
    )
    return backend


def _merges_of(
    tokens: Sequence[str], vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first: what SentencePiece does without writing it down."""
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token in pieces:
        index = vocab[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[index], index, vocab[left], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    special_tokens: Mapping[str, str],
    respelled: bool,
) -> None:
    """Control tokens become special, user-defined ones are found whole in any text, before or after respelling it."""
    named = set(special_tokens.values())
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL or token in named
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=respelled, special=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED and token not in named
        ]
    )


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    found = {}
    for name, key in _ID_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        _required(metadata, key, int)
        if not 0 <= token_id < len(tokens):
            if name in _UNUSED_NAMES:
                continue
            raise InvalidCheckpoint(f"tokenizer.ggml.{key} is {token_id}, the vocabulary ends at {len(tokens) - 1}")
        found[name] = tokens[token_id]
    return found


def _required(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise InvalidCheckpoint(f"the metadata has no tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        raise InvalidCheckpoint(f"tokenizer.ggml.{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _listed(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """A list of values of one type, as those of an array in a file are."""
    values: list[Any] = _required(metadata, key, list)
    if values and not isinstance(values[0], kind):
        raise InvalidCheckpoint(
            f"tokenizer.ggml.{key} has values of type {type(values[0]).__name__}, not {kind.__name__}"
        )
    return values
