"""Rules that cut text into words before byte-level merges, by their names in GGUF files (`tokenizer.ggml.pre`).

The merges of a vocabulary were learned inside such words, so another rule gives other tokens: an unknown name is
refused, never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import UnsupportedModel


@dataclass(frozen=True)
class SplitRule:
    """`patterns` cut one after the other, each within the pieces the one before left."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the vocabulary was learned on composed characters
    whole_words_first: bool = False  # a word that is a token is taken as it is, whatever its merges say
    adds_bos: bool = False  # the default for files that do not state it


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(digits: str, suffix: str) -> str:
    """Words are cut where case changes from lower to upper."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_RULES: tuple[tuple[SplitRule, tuple[str, ...]], ...] = (
    (
        SplitRule((_LLAMA3,), whole_words_first=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
    ),
    (SplitRule((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (SplitRule((_QWEN2,), nfc=True), ("qwen2", "deepseek-r1-qwen", "megrez")),
    (SplitRule((_QWEN2,)), ("stablelm2",)),
    (SplitRule((r"\p{N}", _GPT2)), ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")),
    (SplitRule((_GPT2,)), ("gpt-2", "phi-2", "mpt", "jais", "gigachat")),
    (SplitRule((_GPT2,), nfc=True), ("olmo",)),
    (SplitRule((_cased(r"\p{N}", ""),), whole_words_first=True, adds_bos=True), ("tekken",)),
    (SplitRule((_cased(r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),)), ("gpt-4o",)),
    (SplitRule((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)), ("deepseek-v3",)),
    # Names that older converters wrote.
    (SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
)

SPLIT_RULES: Mapping[str, SplitRule] = MappingProxyType({name: rule for rule, names in _RULES for name in names})


def split_rule(name: str) -> SplitRule:
    """The rule of that name; `UnsupportedModel` names the ones there are."""
    rule = SPLIT_RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(SPLIT_RULES))
        raise UnsupportedModel(f"tokenizer.ggml.pre: {name!r} is not supported; supported are {known}")
    return rule
