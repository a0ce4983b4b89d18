"""Requests, once parsed: plain data that travels from the front end to the engine."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

from quire.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_ADJUSTED_TOKENS = 1024  # of one request: those with a bias, and those that min_tokens forbids for a while
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1  # and as much below 0
# The device computes in float32. Within these limits no number becomes 0 or infinite there, nor makes a logit so.
MAX_TEMPERATURE = 100.0  # logits divided by more are all alike
MIN_SHARE = 1e-30  # of the probability, which leaves one token: top_p and typical_p
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0  # by which logits are multiplied or divided


class FinishReason(StrEnum):
    END = "end"  # an end-of-sequence token
    STOP_TOKEN = "stop_token"  # a token of the request's own `stop_ids`
    STOP_STRING = "stop_string"  # found in the text, of which the engine knows nothing
    LENGTH = "length"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # matches the whole answer
    LARK = "lark"  # rules, in llguidance's dialect
    TOKENS = "tokens"  # JSON: which tokens are allowed, and which sequences of tokens are not


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on the tokens of a thinking section, which stands between two marks. Then its last mark comes."""

    begin: str
    end: str
    is_opened: bool  # the prompt has the first mark
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer: `text` is written in the language that `kind` names."""

    kind: GrammarKind
    text: str
    thinking_budget: ThinkingBudget | None = None


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask with one bit for each token of the vocabulary."""
    return -(-vocab_size // 32)


def json_schema(schema: dict[str, Any]) -> Grammar:
    """Answers are JSON that `schema` describes, its properties in the order they have there."""
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema cannot be written as JSON: {str(error)[:200]}") from None


def regex(pattern: str) -> Grammar:
    """Answers match `pattern`, from beginning to end."""
    return Grammar(GrammarKind.REGEX, pattern)


def choice(texts: Iterable[str]) -> Grammar:
    """Answers are one of `texts`."""
    return regex("|".join("".join(f"\\x{{{ord(char):x}}}" for char in text) for text in texts))


def token_rules(allowed: Iterable[int] | None, banned: Iterable[Sequence[int]] = ()) -> Grammar:
    """Answers of `allowed` tokens only (None: any), without the sequences in `banned`."""
    rules = {"allowed": None if allowed is None else sorted(set(allowed)), "banned": [list(one) for one in banned]}
    return Grammar(GrammarKind.TOKENS, json.dumps(rules))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The way a row's next token is drawn from its logits. The defaults draw from the plain distribution."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 0 takes the most likely token, as anything up to MIN_SHARE
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; n: of the sampled token and of the n most likely

    def __post_init__(self) -> None:
        _require_between("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _require("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 is off)")
        _require_between("top_p", self.top_p, 0, 1)
        _require_between("min_p", self.min_p, 0, 1)
        _require_between("typical_p", self.typical_p, MIN_SHARE, 1)
        _require_between("repetition_penalty", self.repetition_penalty, MIN_PENALTY, MAX_PENALTY)
        _require_between("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_between("presence_penalty", self.presence_penalty, -2, 2)
        for token, bias in self.logit_bias.items():
            _require("a token of logit_bias", token, 0 <= token <= MAX_TOKEN_ID, f"between 0 and {MAX_TOKEN_ID}")
            _require_between(f"logit_bias[{token}]", bias, -100, 100)
        if self.logprobs is not None:
            _require("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what to do with it. `request_id` is chosen by the sender and unique among its live requests."""

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int  # 0 computes the prompt only
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    samples: int = 1  # independent continuations of the prompt
    min_tokens: int = 0  # before these, neither `end_ids` nor `stop_ids` end it
    end_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens
    ignore_end: bool = False
    stop_ids: tuple[int, ...] = ()
    priority: int = 0  # lower runs first
    salt: str = ""  # only requests with the same salt share cached pages
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # unless it is of tokens, it also says where the answer may end
    timings: bool = False  # an account of what became of it is wanted
    traced: bool = False  # records of some of its steps are wanted
    adapter: str | None = None  # the name of a LoRA adapter
    # Of the adapter that it has begun with, which `adapter` may not name any more; "" before an engine has it.
    adapter_digest: str = ""

    def __post_init__(self) -> None:
        _require("prompt", "empty", len(self.prompt) > 0, "at least one token")
        lowest, highest = min(self.prompt), max(self.prompt)
        _require("a prompt token", lowest, lowest >= 0, "at least 0")
        _require("a prompt token", highest, highest <= MAX_TOKEN_ID, f"at most {MAX_TOKEN_ID}")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 0, "at least 0")
        _require("samples", self.samples, self.samples >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        for name in ("end_ids", "stop_ids"):
            for token in getattr(self, name):
                _require(f"a token of {name}", token, 0 <= token <= MAX_TOKEN_ID, f"between 0 and {MAX_TOKEN_ID}")
        adjusted = len(self.sampling.logit_bias)
        if self.min_tokens:
            adjusted += len(self.end_ids) + len(self.stop_ids)
        name = "the number of tokens that logit_bias, and min_tokens with end_ids and stop_ids, name together"
        _require(name, adjusted, adjusted <= MAX_ADJUSTED_TOKENS, f"at most {MAX_ADJUSTED_TOKENS}")
        for name in ("queue_timeout_s", "timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None:
                _require(name, seconds, seconds > 0, "above 0")
        if self.prompt_logprobs is not None:
            top = self.prompt_logprobs
            _require("prompt_logprobs", top, 0 <= top <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        if self.grammar is not None and self.grammar.kind is not GrammarKind.TOKENS:
            # Nothing but an end may follow a complete answer.
            ignores = self.ignore_end
            _require("ignore_end", ignores, not ignores, "false with a grammar, which says where to end")
            _require("min_tokens", self.min_tokens, not self.min_tokens, "0 with a grammar, which says where to end")
            _require("end_ids", "empty", bool(self.end_ids), "at least one token with a grammar, which ends by it")


def _require_between(name: str, value: float, low: float, high: float) -> None:
    _require(name, value, low <= value <= high, f"between {low:g} and {high:g}")


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    finite = isfinite(value) if isinstance(value, float) else True
    if not (holds and finite):
        raise InvalidRequest(f"{name} is {value}; it must be {rule}", param=None if " " in name else name)
