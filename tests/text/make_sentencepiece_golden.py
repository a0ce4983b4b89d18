"""Writes golden/sentencepiece.json: small SentencePiece vocabularies, as a GGUF file would carry them, and what
SentencePiece itself makes of the corpus. Needs the `sentencepiece` package, which the tests do not.

    python -m tests.text.make_sentencepiece_golden
"""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

from tests.text.corpus import TEXTS

GOLDEN = Path(__file__).parent / "golden" / "sentencepiece.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

VARIANTS: dict[str, dict[str, Any]] = {
    # As Llama 2 and Mistral: a space before the first word, runs of spaces learned as pieces.
    "prefixed": {"add_dummy_prefix": True, "allow_whitespace_only_pieces": True},
    # As Gemma: no space, and runs of spaces, newlines and tags that are found whole.
    "unprefixed": {
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁" * n for n in range(2, 32)] + ["\n" * n for n in range(1, 8)] + ["<div>", "</div>"],
    },
}


def train(options: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            [line for text in TEXTS for line in text.split("\n") if line and "\x00" not in line] * 3
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def type_of(model: sentencepiece.SentencePieceProcessor, index: int, user_defined: set[str]) -> int:
    if model.is_unknown(index):
        return _UNKNOWN
    if model.is_control(index):
        return _CONTROL
    if model.is_byte(index):
        return _BYTE
    return _USER_DEFINED if model.id_to_piece(index) in user_defined else _NORMAL


def describe(options: dict[str, Any]) -> dict[str, Any]:
    model = train(options)
    user_defined = set(options.get("user_defined_symbols", ()))
    types = [type_of(model, index, user_defined) for index in range(model.get_piece_size())]
    pieces = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    metadata = {
        "tokenizer.ggml.model": "llama",
        # Converters write user-defined pieces as they stand in text.
        "tokenizer.ggml.tokens": [
            piece.replace("▁", " ") if kind == _USER_DEFINED else piece
            for piece, kind in zip(pieces, types, strict=True)
        ],
        "tokenizer.ggml.scores": [model.get_score(index) for index in range(model.get_piece_size())],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": options["add_dummy_prefix"],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    encoded = [model.encode(text) for text in TEXTS]
    return {"metadata": metadata, "encoded": encoded, "decoded": [model.decode(ids) for ids in encoded]}


if __name__ == "__main__":
    golden = {name: describe(options) for name, options in VARIANTS.items()}
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
