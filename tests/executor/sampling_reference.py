"""Sampling in plain numpy, with sorts and float64: what the device must do, written to be read."""

from itertools import product
from typing import Any

import numpy as np

from quire.request import SamplingParams

Array = np.ndarray[Any, Any]
CLOSE = 2e-5  # probabilities so near to a limit may fall on either side of it in float32


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def penalised(logits: Array, prompt: list[int], answer: list[int], params: SamplingParams) -> Array:
    logits = logits.astype(np.float64)
    for token in set(prompt + answer):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(answer):
        logits[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def kept(logits: Array, params: SamplingParams) -> Array:
    """Which tokens the filters leave, for logits that the temperature has been applied to."""
    return _kept(logits.astype(np.float64), params.top_k, params.top_p, params.min_p, params.typical_p)


def possibly_kept(logits: Array, params: SamplingParams) -> list[Array]:
    """What may be left when every limit is a little lower or higher; in most cases the same set over and over."""
    logits = logits.astype(np.float64)
    nudges = [
        (0.0, CLOSE, -CLOSE) if limit < 1 else (0.0,)
        for limit in (params.top_p, 1 - params.min_p, params.typical_p, params.typical_p)
    ]
    return [
        _kept(
            logits, params.top_k, params.top_p + p, min(params.min_p * (1 + m), 1.0), params.typical_p + t, max(d, 0.0)
        )
        for p, m, t, d in product(*nudges)
    ]


def _kept(logits: Array, top_k: int, top_p: float, min_p: float, typical_p: float, alike: float = 0.0) -> Array:
    """`alike`: differences from the entropy that count as equal."""
    keep = np.isfinite(logits)
    if top_k and top_k < len(logits):
        keep &= logits >= np.sort(logits)[::-1][top_k - 1]
    if top_p < 1:
        probabilities = softmax(np.where(keep, logits, -np.inf))
        keep &= _smallest_set(-probabilities, probabilities, top_p, 0.0)
    probabilities = softmax(np.where(keep, logits, -np.inf))
    keep &= probabilities >= min_p * probabilities.max()
    if typical_p < 1:
        probabilities = softmax(np.where(keep, logits, -np.inf))
        information = -np.log(probabilities, where=probabilities > 0, out=np.full(len(logits), -np.inf))
        entropy = (probabilities * np.where(probabilities > 0, information, 0)).sum()
        difference = np.where(keep, np.abs(information - entropy), np.inf)
        keep &= _smallest_set(difference, probabilities, typical_p, alike)
    return keep


def _smallest_set(order: Array, probabilities: Array, mass: float, alike: float) -> Array:
    """The first in the order that have this mass together, with all that stand level with the last of them."""
    by_order = np.argsort(order, kind="stable")
    reached = np.cumsum(probabilities[by_order]) >= mass
    if not reached.any():
        return np.ones(len(order), bool)
    return np.asarray(order <= order[by_order[reached.argmax()]] + alike)


def distribution(logits: Array, params: SamplingParams) -> Array:
    """The probability of each token, for logits that are not penalised or biased any more."""
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    scaled = logits.astype(np.float64) / params.temperature
    return softmax(np.where(kept(scaled, params), scaled, -np.inf))
