"""The text of each token, by the rules of the tokenizer's decoder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModel

# Text that stands for itself; bytes that may need their neighbours to be a character; or nothing at all.
Piece = str | bytes | None


@dataclass(frozen=True)
class TextRule:
    """The spelling of text in a vocabulary.

    Byte-level vocabularies spell every byte as a character. The others spell text as it is, but for `replacements`,
    and with `byte_fallback` a byte as `<0x0A>`.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    stripped_prefix: str = ""  # one character, taken from the start of a text up to `stripped_count` times
    stripped_count: int = 0
    dropped_in_first_token: str = ""  # a character that is nothing, not a space, in the first token of a text

    def piece(self, token: str) -> Piece:
        """The text of `token` in the middle of a text."""
        if self.byte_level:
            return _byte_level_piece(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        return token

    def first_piece(self, token: str) -> Piece:
        """The text of `token` as the first of a text, before `stripped_prefix` is removed."""
        return self.piece(token.replace(self.dropped_in_first_token, "") if self.dropped_in_first_token else token)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where it prints, else the next free one from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_piece(token: str) -> Piece:
    try:
        spelled = bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, which spells itself
        spelled = token.encode()
    try:
        return spelled.decode() or None
    except UnicodeDecodeError:
        return spelled


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def rule_of_decoder(state: bytes | None) -> TextRule:
    """The rule a decoder (its serialised form) follows; one that cannot be followed token by token is refused."""
    decoder: dict[str, Any] = json.loads(state) if state else {"type": None}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TextRule(byte_level=True)
    if kinds == ["Metaspace"]:
        return _metaspace_rule(steps[0])
    return _steps_rule(steps, kinds)


def _metaspace_rule(step: dict[str, Any]) -> TextRule:
    space = step["replacement"]
    prefixed = step.get("prepend_scheme", "always") != "never"
    return TextRule(replacements=((space, " "),), dropped_in_first_token=space if prefixed else "")


def _steps_rule(steps: Sequence[dict[str, Any]], kinds: Sequence[str | None]) -> TextRule:
    """Replace*, then ByteFallback, Fuse and Strip, each at most once: what SentencePiece vocabularies use."""
    rest = list(zip(kinds, steps, strict=True))
    replacements = []
    while rest and rest[0][0] == "Replace" and "String" in rest[0][1]["pattern"]:
        step = rest.pop(0)[1]
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(rest) and rest[0][0] == "ByteFallback"
    rest = rest[byte_fallback:]
    fused = bool(rest) and rest[0][0] == "Fuse"
    rest = rest[fused:]
    strip: dict[str, Any] = {}
    if fused and rest and rest[0][0] == "Strip" and rest[0][1]["stop"] == 0:
        strip = rest.pop(0)[1]
    if rest or not kinds:
        raise UnsupportedModel(f"tokenizer decoder {'+'.join(str(kind) for kind in kinds)} is not supported")
    return TextRule(
        replacements=tuple(replacements),
        byte_fallback=byte_fallback,
        stripped_prefix=strip.get("content", ""),
        stripped_count=strip.get("start", 0),
    )


class PieceTable(dict[int, Piece]):
    """Token id to piece, computed on first use: a vocabulary is large and a text uses little of it.

    Shared by threads: two that miss the same id store the same value.
    """

    def __init__(self, work_out: Callable[[int], Piece]) -> None:
        super().__init__()
        self._work_out = work_out

    def __missing__(self, token_id: int) -> Piece:
        piece = self._work_out(token_id)
        self[token_id] = piece
        return piece
