"""The sampling fields of requests, of every API."""

from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequest, invalid, shown
from quire.files.generation_defaults import GenerationDefaults
from quire.request import MAX_LOGPROBS, SamplingParams
from quire.text.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5  # a temperature below takes the most likely token
MAX_BIASES = 1024
_SEEDS = 2**64


def sampling_params(given: Mapping[str, Any], defaults: GenerationDefaults, tokenizer: Tokenizer) -> SamplingParams:
    """`given` has the names of SamplingParams. None means not given; then the model's defaults apply."""
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"):
        stated = getattr(defaults, name)
        if stated is not None:
            chosen.setdefault(name, stated)
    if 0 < chosen.get("temperature", 1) < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    if "top_k" in chosen:
        chosen["top_k"] = _top_k(chosen["top_k"], tokenizer.vocab_size)
    if "logit_bias" in chosen:
        chosen["logit_bias"] = _logit_bias(chosen["logit_bias"], tokenizer)
    if "logprobs" in chosen:
        between("logprobs", chosen["logprobs"], 0, MAX_LOGPROBS)
    return SamplingParams(**chosen)


def seed_of(given: int | None) -> int:
    """The engine's seed. Where none is given the service draws one."""
    if given is None:
        return 0
    between("seed", given, -(2**63), _SEEDS - 1)
    return given % _SEEDS


def between(name: str, value: float, low: float, high: float, *, param: str | None = None) -> None:
    """`param`: the field, where `name` is a description of it."""
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=param or name)


def at_most(name: str, value: float, limit: float, *, param: str | None = None) -> None:
    """`param`: the field, where `name` is a description of it."""
    if not value <= limit:
        raise InvalidRequest(f"{name} is {value}; it must be at most {limit:g}", param=param or name)


def _top_k(top_k: int, vocab_size: int) -> int:
    if top_k == -1 or top_k >= vocab_size:
        return 0  # off, or no different from off
    return top_k


def _logit_bias(given: Mapping[str, float] | list[list[float]], tokenizer: Tokenizer) -> dict[int, float]:
    at_most("the number of entries in logit_bias", len(given), MAX_BIASES, param="logit_bias")
    if isinstance(given, list):
        given = _bias_pairs(given)
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise invalid("logit_bias", f"has the key {key[:40]!r}; keys are token ids")
        token = int(key)
        if token >= tokenizer.vocab_size:
            raise invalid("logit_bias", f"has the token {token}; the vocabulary has {tokenizer.vocab_size}")
        biases[token] = bias
    return biases


def _bias_pairs(given: list[list[float]]) -> dict[str, float]:
    """Pairs of a token id and a bias, as llama.cpp has them too. An empty list is what PHP makes of no biases."""
    for index, pair in enumerate(given):
        if len(pair) != 2 or not float(pair[0]).is_integer():
            raise invalid(f"logit_bias[{index}]", f"is {shown(pair)}; it must be a token id and a bias")
    return {str(int(token)): bias for token, bias in given}
