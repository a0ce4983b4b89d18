"""The tokenizer of a Hugging Face folder or a GGUF file."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from quire.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel, shown
from quire.files.json_file import MAX_VOCABULARY_BYTES, MAX_VOCABULARY_VALUES, parse_object, read_json_if_present
from quire.files.regular_file import read_regular
from quire.text.gguf_vocabulary import surround, tokenizer_from_metadata
from quire.text.shield import STAND_INS, RenderedPrompt, Shield
from quire.text.token_text import Piece, PieceTable, TextRule, rule_of_decoder

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenSpan(NamedTuple):
    """A token of a text: characters `[start, stop)`, which for a token the text does not hold (bos) is empty."""

    id: int
    piece: str
    start: int
    stop: int


class Tokenizer:
    """A vocabulary and its rules, fixed once made; any thread may use it.

    The interpreter lock is let go while text is encoded, so a long prompt does not block other threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        """`backend` belongs to this object from here on; `special_tokens` are by name, as chat templates use them."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.text_rule: TextRule = rule_of_decoder(backend.decoder and backend.decoder.__getstate__())
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._all_pieces = PieceTable(self._piece_of)
        self._visible_pieces = PieceTable(lambda i: None if i in self.special_ids else self._piece_of(i))

    # All by the library's functions for batches, beside which other threads run: those for one text keep them waiting.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens`: bos and eos by the vocabulary's rules.

        Special tokens written out in the text become those tokens; `encode_prompt` encodes text that is not trusted.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode`, for many texts at once, on all cores."""
        _check_texts(texts)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_with_spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Like `encode`, with the span of each token in the text."""
        _check_texts([text])
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return _spans(encoding)

    def prepare_shield(self) -> None:
        """Build the stand-ins for special tokens now: with a large vocabulary this blocks all threads for a second."""
        self._special_id_of.keys()

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """The tokens of a rendered conversation: its template's special tokens, and plain text where clients typed
        others."""
        if prompt.standing is None:
            return self.encode(prompt.text, add_special_tokens=False)
        _check_texts([prompt.text])
        (encoding,) = self._standing_backend.encode_batch_fast([prompt.standing], add_special_tokens=False)
        return [self._special_id_of.get(token_id, token_id) for token_id in encoding.ids]

    def encode_prompt_with_spans(self, prompt: RenderedPrompt) -> list[TokenSpan]:
        """Like `encode_prompt`, with the span of each token in the text."""
        if prompt.standing is None:
            return self.encode_with_spans(prompt.text, add_special_tokens=False)
        _check_texts([prompt.text])
        specials = self.shield.specials
        lengths = (len(specials[ord(one) - STAND_INS]) if ord(one) >= STAND_INS else 1 for one in prompt.standing)
        offsets = [0, *accumulate(lengths)]
        (encoding,) = self._standing_backend.encode_batch([prompt.standing], add_special_tokens=False)
        found = []
        for span in _spans(encoding):
            token_id = self._special_id_of.get(span.id, span.id)
            piece = span.piece if token_id == span.id else self.piece(token_id)
            found.append(TokenSpan(token_id, piece, offsets[span.start], offsets[span.stop]))
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens. An id inside the vocabulary that names no token has no text."""
        self.check_ids(token_ids)
        texts: list[str] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def to_json(self) -> str:
        """The vocabulary and its rules, as the tokenizers library writes them to a file."""
        text: str = self._backend.to_str()
        return text

    def added_tokens(self) -> dict[str, dict[str, str | bool]]:
        """The tokens that are found whole in any text, by their ids, in the form of tokenizer_config.json."""
        rules = ("lstrip", "normalized", "rstrip", "single_word", "special")
        return {
            str(token_id): {"content": token.content} | {rule: getattr(token, rule) for rule in rules}
            for token_id, token in sorted(self._backend.get_added_tokens_decoder().items())
        }

    def check_ids(self, token_ids: Iterable[int], param: str | None = None) -> None:
        """Refuse ids that are not in the vocabulary; `param` is the field that holds them."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary: 0 to {self.vocab_size - 1}", param=param
                )

    def special_id(self, token: str) -> int | None:
        """The id of a special token; None where `token` is not one."""
        token_id = self.id_of(token)
        return token_id if token_id is not None and self.is_special(token_id) else None

    def added_id(self, token: str) -> int | None:
        """The id of an added token; None if `token` is not one."""
        token_id = self.id_of(token)
        return token_id if token_id in self._added_ids else None

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        self.check_ids((token_id,))
        piece: str | None = self._backend.id_to_token(token_id)
        return "" if piece is None else piece

    def id_of(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        token_id: int | None = self._backend.token_to_id(piece)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The text of the token in the middle of a text, as bytes; a character may take several tokens.

        Nothing where there is no such token: the vocabulary of a model is often larger than that of its tokenizer.
        """
        piece = self._all_pieces[token_id]
        if piece is None:
            return b""
        return piece.encode() if isinstance(piece, str) else piece

    def pieces(self, skip_special_tokens: bool) -> PieceTable:
        """The text of each token in the middle of a text."""
        return self._visible_pieces if skip_special_tokens else self._all_pieces

    def first_piece(self, token_id: int) -> Piece:
        """The text of the token as the first of a text."""
        token = self._backend.id_to_token(token_id)
        return None if token is None else self.text_rule.first_piece(token)

    def _piece_of(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return None if token is None else self.text_rule.piece(token)

    @cached_property
    def shield(self) -> Shield:
        added = self._backend.get_added_tokens_decoder().values()
        return Shield(token.content for token in added if token.special)

    @cached_property
    def _standing_backend(self) -> tokenizers.Tokenizer:
        """The vocabulary that reads special tokens as plain text, with a stand-in for each. A copy: the switch is a
        state of the whole object."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens(
            [
                AddedToken(chr(STAND_INS + index), normalized=False, lstrip=added[one].lstrip, rstrip=added[one].rstrip)
                for index, one in enumerate(self.shield.specials)
            ]
        )
        return backend

    @cached_property
    def _special_id_of(self) -> dict[int, int]:
        """The ids of special tokens by those of their stand-ins."""
        ids: dict[int, int] = {}
        for index, special in enumerate(self.shield.specials):
            standing, own = self._standing_backend.token_to_id(chr(STAND_INS + index)), self.id_of(special)
            assert standing is not None, "it was added"
            assert own is not None, "the vocabulary has it"
            ids[standing] = own
        return ids


def _spans(encoding: tokenizers.Encoding) -> list[TokenSpan]:
    return [
        TokenSpan(token_id, piece, start, stop)
        for token_id, piece, (start, stop) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
    ]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or of a GGUF file."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    from quire.files.gguf import read_metadata  # folders do not need it

    try:
        return tokenizer_from_gguf(read_metadata(path))
    except (InvalidCheckpoint, UnsupportedModel) as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes."""
    return Tokenizer(*tokenizer_from_metadata(metadata))


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise InvalidCheckpoint(f"{file}: no such file; a model folder needs its fast tokenizer")
    backend = _read_backend(file)
    config = read_json_if_present(folder / "special_tokens_map.json")
    config |= read_json_if_present(folder / "tokenizer_config.json")
    _add_tokens(backend, folder, config)
    special_tokens = _special_tokens(config)
    _mark_special(backend, [*special_tokens.values(), *_extra_special_tokens(config)])
    for name in ("bos_token", "eos_token"):
        if name in special_tokens and backend.token_to_id(special_tokens[name]) is None:
            raise InvalidCheckpoint(f"{file}: {name} {special_tokens[name]!r} is not in the vocabulary")
    if "add_bos_token" in config or "add_eos_token" in config:
        # An explicit value overrides what tokenizer.json adds.
        surround(
            backend,
            special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return Tokenizer(backend, special_tokens)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        text = read_regular(file, MAX_VOCABULARY_BYTES)
    except OSError as error:
        raise InvalidCheckpoint(f"{file}: cannot be read: {error.strerror}") from error
    try:
        return tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing narrower
        parse_object(
            text, str(file), MAX_VOCABULARY_VALUES
        )  # its errors describe a damaged file better than the library's
        raise InvalidCheckpoint(f"{file}: not a tokenizer: {error}") from error


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens that the configuration names and `tokenizer.json` lacks, in the order of their ids."""
    listed = config.get("added_tokens_decoder", {})
    try:
        wanted = {
            int(token_id): AddedToken(**token) if isinstance(token, dict) else AddedToken(token)
            for token_id, token in listed.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{folder}: added_tokens_decoder is {shown(listed)}; a table from token ids to tokens is needed"
        ) from error
    for content, token_id in read_json_if_present(folder / "added_tokens.json").items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidCheckpoint(f"{folder / 'added_tokens.json'}: {shown(content)} has the id {shown(token_id)}")
        wanted.setdefault(token_id, AddedToken(content))
    for token_id, token in sorted(wanted.items()):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise InvalidCheckpoint(
                f"{folder}: token {token.content!r} has id {token_id} by its configuration, not {found}"
            )
    _mark_special(backend, [token.content for token in wanted.values() if token.special])


def _mark_special(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Make tokens of the vocabulary special; one that it does not hold has no embedding, and is left out."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [content for content in contents if content not in special and backend.token_to_id(content) is not None]
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config[name]) for name in _NAMES if config.get(name) is not None}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= {name: _content(token) for name, token in extra.items()}
    return found


def _extra_special_tokens(config: Mapping[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens")
    return [
        _content(token)
        for token in [*config.get("additional_special_tokens", ()), *(extra if isinstance(extra, list) else ())]
    ]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _check_texts(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"text: character {error.start} is a lone surrogate, U+{ord(text[error.start]):04X}, not a character"
            ) from error
