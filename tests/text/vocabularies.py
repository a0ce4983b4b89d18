"""Small vocabularies of every kind, trained on the corpus, and what a GGUF conversion of them carries."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.text.corpus import TEXTS

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ("<think>", "é", "  ")  # in the byte alphabet, "é" is a byte: added tokens spell themselves or not

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# By the name GGUF has for it: the parts of the `tokenizer.json` that models with this rule publish.
BYTE_LEVEL_ORIGINALS: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    "smollm": (
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        ),
    ),
    "llama-bpe": (
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_CL100K), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    "qwen2": (
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_CL100K.replace("{1,3}", "")), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
}


@cache
def byte_level_original(pre: str, user_defined: tuple[str, ...] = USER_DEFINED) -> Tokenizer:
    normalizer, pre_tokenizer = BYTE_LEVEL_ORIGINALS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS * 2,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    return tokenizer


def byte_level_metadata(pre: str, user_defined: tuple[str, ...] = USER_DEFINED) -> dict[str, Any]:
    """What a conversion of that `byte_level_original` to GGUF carries."""
    original = byte_level_original(pre, user_defined)
    vocab = original.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [3 if token in SPECIAL_TOKENS else 4 if token in user_defined else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in json.loads(original.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
    }


@cache
def byte_fallback_tokenizer(prefixed: bool = True) -> Tokenizer:
    """As Llama 2 (prefixed) and Gemma (not) publish theirs, with few pieces, so that most text falls back to bytes."""
    letters = sorted({character for text in TEXTS[:20] for character in text if character.isascii()} - {" "} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pairs = [("▁", "t"), ("▁", "a"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("o", "r"), ("▁▁", "▁▁")]
    tokens += [left + right for left, right in pairs]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=pairs,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("", normalized=False)])
    return tokenizer


@cache
def metaspace_tokenizer(prefixed: bool = True) -> Tokenizer:
    """SentencePiece-style without bytes: unknown characters are `<unk>`."""
    scheme = "always" if prefixed else "never"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    return tokenizer
