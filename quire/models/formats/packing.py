"""Codes of four and eight bits that tools pack into words of 32.

In memory, codes of eight bits are int8, and those of four bits uint8, two in a byte, the lower first.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The place in a word of each of the eight outputs that it holds.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_CHUNK_OUTPUTS = 1 << 9  # turned at a time, so that temporaries stay small


def unpacked(words: Array, bits: int, count: int) -> Array:
    """uint8 [n, count]: codes of words [n, w], the lowest bits first."""
    bytes_ = _bytes(words)
    if bits == 4:
        bytes_ = np.stack((bytes_ & 15, bytes_ >> 4), axis=-1).reshape(len(words), -1)
    return bytes_[:, :count]


def unpacked_awq(words: Array) -> Array:
    """uint8 [n, 8 w] of AWQ's words [n, w]."""
    codes = unpacked(words, 4, 8 * words.shape[1])
    return codes.reshape(len(words), -1, 8)[:, :, AWQ_PLACES].reshape(codes.shape)


def plus_one(words: Array, bits: int) -> Array:
    """Words of codes that are larger by one. The carry of a code that wraps to 0 goes to the next: tools that store
    codes less one subtract from whole words, so that a code of 0 has borrowed from it."""
    ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
    return (words.view(np.uint32) + ones).view(np.int32)


def codes_by_output(words: Array, bits: int, inputs: int) -> Array:
    """Codes in memory of words [outputs, w], whose codes are unsigned and lie along the inputs."""
    bytes_ = _bytes(words)[:, : inputs * bits // 8]
    return bytes_ if bits == 4 else (bytes_ ^ 0x80).view(np.int8)


def codes_of_gptq(words: Array, bits: int, inputs: int) -> Array:
    """The same of words [w, outputs]."""
    outputs = words.shape[1]
    codes = np.empty((outputs, inputs * bits // 8), np.uint8 if bits == 4 else np.int8)
    for start in range(0, outputs, _CHUNK_OUTPUTS):
        part = np.ascontiguousarray(words[:, start : start + _CHUNK_OUTPUTS].T)
        codes[start : start + len(part)] = codes_by_output(part, bits, inputs)
    return codes


def codes_of_awq(words: Array) -> Array:
    """The same of words [inputs, outputs / 8], whose codes lie along the outputs in AWQ's order."""
    inputs, num_words = words.shape
    codes = np.empty((8 * num_words, inputs // 2), np.uint8)
    step = _CHUNK_OUTPUTS // 8
    for start in range(0, num_words, step):
        rows = unpacked_awq(words[:, start : start + step]).T  # [outputs, inputs]
        codes[8 * start : 8 * start + len(rows)] = rows[:, 0::2] | (rows[:, 1::2] << 4)
    return codes


def zeros_in_memory(zeros: Array, bits: int) -> Array:
    """Zero points of unsigned codes, as those of codes in memory."""
    return zeros.astype(np.int8) if bits == 4 else zeros.astype(np.int16) - np.int16(128)


def _bytes(words: Array) -> Array:
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8).reshape(len(words), -1)
