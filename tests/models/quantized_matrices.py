"""Matrices quantised as the tools of each format quantise and store them, and what they stand for.

Nothing here is shared with the code that reads them: words are filled bit by bit, and matrices widened by numpy.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Round = Callable[[Array], Array]
GROUP = 16
BLOCK = (12, 16)  # divides neither side of every matrix
FLOAT8 = ml_dtypes.float8_e4m3fn


class Matrix(NamedTuple):
    """The tensors of a module by suffix, the float32 matrix they stand for, and its rounding of activations."""

    tensors: dict[str, Array]
    wide: Array
    round: Round = lambda x: x


Make = Callable[[str, Array], Matrix]


def in_words(codes: Array, bits: int) -> Array:
    """int32 [n, words] of unsigned codes [n, count], the first in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for i in range(codes.shape[1]):
        words[:, i // per_word] |= codes[:, i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    return words.view(np.int32)


def quantized(weight: Array, bits: int, index: Array, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Unsigned codes [o, i], float16 scales and zero points [o, groups], and the float32 numbers."""
    groups = index.max() + 1
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = np.zeros((len(weight), groups), np.float16), np.zeros((len(weight), groups), np.int64)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, group], zeros[:, group] = np.abs(part).max(1) / (middle - 1), middle
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group].astype(np.float32)), 1, most)
    wide_scales = scales.astype(np.float32)[:, index]
    codes = np.clip(np.rint(weight / wide_scales) + zeros[:, index], 0, most).astype(np.int64)
    return codes, scales, zeros, ((codes - zeros[:, index]) * wide_scales).astype(np.float32)


def runs(inputs: int, size: int) -> Array:
    return np.arange(inputs) // size


def shuffled_groups(module: str, inputs: int, size: int) -> Array:
    """As act-order leaves them; q, k and v see the same inputs, and so have the same."""
    part = module
    for other, first in ((".k_proj", ".q_proj"), (".v_proj", ".q_proj"), (".up_proj", ".gate_proj"), (".w3", ".w1")):
        part = part.replace(other, first)
    return np.random.default_rng(zlib.crc32(part.encode())).permutation(runs(inputs, size))


def gptq(bits: int, *, symmetric: bool = True, version: int = 1, act_order: bool = False) -> Make:
    def make(module: str, weight: Array) -> Matrix:
        index = shuffled_groups(module, weight.shape[1], GROUP) if act_order else runs(weight.shape[1], GROUP)
        codes, scales, zeros, wide = quantized(weight, bits, index, symmetric)
        tensors = {
            "qweight": in_words(codes, bits).T,
            "qzeros": in_words(zeros.T - (1 if version == 1 else 0), bits),
            "scales": scales.T,
            "g_idx": index.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),  # older tools write one where the model has none
        }
        return Matrix(tensors, wide)

    return make


def awq(module: str, weight: Array) -> Matrix:
    codes, scales, zeros, wide = quantized(weight, 4, runs(weight.shape[1], GROUP), False)

    def columns(values: Array) -> Array:
        """Words of eight columns each, of which the second lies in the fifth place and so on."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return in_words(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape), 4)

    return Matrix({"qweight": columns(codes.T), "qzeros": columns(zeros.T), "scales": scales.T}, wide)


def float8(values: Array) -> Array:
    return np.clip(values, -448, 448).astype(FLOAT8)


def float8_blocks(weight: Array, block: tuple[int, int], scale_name: str, round_: Round) -> Matrix:
    high, wide = block
    scales = np.zeros((-(-len(weight) // high), -(-weight.shape[1] // wide)), np.float32)
    codes, widened = np.zeros(weight.shape, FLOAT8), np.zeros(weight.shape, np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = np.s_[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
            scales[row, column] = np.abs(weight[at]).max() / 448
            codes[at] = float8(weight[at] / scales[row, column])
            widened[at] = codes[at].astype(np.float32) * scales[row, column]
    return Matrix({"weight": codes, scale_name: scales}, widened, round_)


def by_run(size: int) -> Round:
    """Each run of inputs as e4m3 with its own scale."""

    def round_(x: Array) -> Array:
        parts = []
        for start in range(0, x.shape[-1], size):
            part = x[:, start : start + size].astype(np.float32)
            scale = np.abs(part).max(1, keepdims=True) / np.float32(448)
            parts.append(float8(part / scale).astype(np.float32) * scale)
        return np.concatenate(parts, axis=1)

    return round_


def by_token(is_float: bool, symmetric: bool = True) -> Round:
    def round_(x: Array) -> Array:
        x = x.astype(np.float32)
        reach = np.abs(x).max(1, keepdims=True)
        if is_float:
            scale = reach / np.float32(448)
            return float8(x / scale).astype(np.float32) * scale
        if symmetric:
            scale = reach / np.float32(127.5)
            return np.clip(np.rint(x / scale), -128, 127) * scale
        low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
        scale = (high - low) / np.float32(255)
        zero = np.rint(np.clip(-128 - low / scale, -128, 127))
        return (np.clip(np.rint(x / scale + zero), -128, 127) - zero) * scale

    return round_


def by_bounded_token(reach: float) -> Round:
    """As fbgemm rounds: what a token has beyond `reach` is cut, and scales have a least one."""

    def round_(x: Array) -> Array:
        most = np.minimum(np.abs(x.astype(np.float32)).max(1, keepdims=True), np.float32(reach))
        scale = np.maximum(most / np.float32(448), np.float32(1 / (448 * 512)))
        return float8(x / scale).astype(np.float32) * scale

    return round_


def by_stored(scale: float, is_float: bool, zero: float | None = None) -> Round:
    divisor = np.float32(scale)

    def round_(x: Array) -> Array:
        codes = x.astype(np.float32) / divisor + np.float32(zero or 0)
        if is_float:
            return float8(codes).astype(np.float32) * divisor
        return (np.clip(np.rint(codes), -128, 127) - np.float32(zero or 0)) * divisor

    return round_


def float8_rows(
    strategy: str, scale_name: str, input_name: str | None, scale_dtype: Any = np.float32, round_: Round | None = None
) -> Make:
    def make(module: str, weight: Array) -> Matrix:
        reach = np.abs(weight).max(1, keepdims=True) if strategy == "channel" else np.abs(weight).max(keepdims=True)
        scale = (reach / 448).astype(scale_dtype)
        codes = float8(weight / scale.astype(np.float32))
        tensors = {"weight": codes, scale_name: scale if strategy == "channel" else scale.reshape(1)}
        rounds = round_ or by_token(True)
        if input_name is not None:
            tensors[input_name], rounds = np.full(1, 0.03, np.float32), by_stored(0.03, True)
        return Matrix(tensors, codes.astype(np.float32) * scale.astype(np.float32), rounds)

    return make


def int8_rows(round_: Round, inputs: Mapping[str, Array]) -> Make:
    def make(module: str, weight: Array) -> Matrix:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
        codes = np.clip(np.rint(weight / scale.astype(np.float32)), -128, 127).astype(np.int8)
        wide = codes.astype(np.float32) * scale.astype(np.float32)
        return Matrix({"weight": codes, "weight_scale": scale, **inputs}, wide, round_)

    return make


def packed(bits: int, *, size: int | None = GROUP, symmetric: bool = True, act_order: bool = False) -> Make:
    def make(module: str, weight: Array) -> Matrix:
        width = weight.shape[1]
        index = runs(width, size or width) if not act_order else shuffled_groups(module, width, size or width)
        codes, scales, zeros, wide = quantized(weight, bits, index, symmetric)
        tensors = {
            "weight_packed": in_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = index.astype(np.int32)
        return Matrix(tensors, wide)

    return make
