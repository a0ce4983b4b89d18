"""Matrices of four-bit floats as their tools store them, and what they stand for."""

from typing import Any

import numpy as np

from tests.models.quantized_matrices import FLOAT8, Array, Make, Matrix, Round, float8

SIZES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
OVER = np.float32(300)  # scales of activations are e4m3 over it, so that they reach 9


def four_bit_codes(numbers: Array) -> Array:
    """The nearest by distance; the even code of two that are as near."""
    size = np.abs(numbers)[..., None].astype(np.float64)
    away = np.abs(size - SIZES)
    best = away.argmin(-1)
    above = np.minimum(best + 1, 7)
    is_tied = np.take_along_axis(away, best[..., None], -1) == np.take_along_axis(away, above[..., None], -1)
    codes = np.where(is_tied[..., 0] & (best % 2 == 1), above, best)
    return codes + 8 * np.signbit(numbers)


def values_of(codes: Array) -> Array:
    return np.concatenate((SIZES, -SIZES))[codes]


def in_groups(x: Array, size: int) -> Array:
    return x.astype(np.float32).reshape(len(x), x.shape[1] // size, size)


def local_scales(groups: Array, over: Any) -> Array:
    """e4m3 of groups [n, g, 16], to be divided by `over`."""
    wanted = np.abs(groups).max(-1, keepdims=True) / np.float32(6) * np.float32(over)
    found = float8(wanted)
    return np.where(found.astype(np.float32) == 0, np.float32(0.125), found.astype(np.float32)).astype(FLOAT8)


def power_scales(groups: Array) -> Array:
    """Powers of two plus 127 of groups [n, g, 32], whose largest number becomes one below 7."""
    reach = np.abs(groups).max(-1, keepdims=True)
    fraction, exponent = np.frexp(reach)  # reach = fraction * 2**exponent, fraction from 0.5 to 1
    return np.where(reach == 0, 1, exponent - 1 - 2 + (fraction >= 0.875) + 127).astype(np.uint8)


def rounded(groups: Array, scale: Array) -> Array:
    return (values_of(four_bit_codes(np.clip(groups / scale, -6, 6))) * scale).reshape(
        len(groups), groups.shape[1] * groups.shape[2]
    )


def by_local(over: Any) -> Round:
    def round_(x: Array) -> Array:
        groups = in_groups(x, 16)
        return rounded(groups, local_scales(groups, over).astype(np.float32) / np.float32(over))

    return round_


def by_power(x: Array) -> Array:
    groups = in_groups(x, 32)
    return rounded(groups, np.ldexp(np.float32(1), power_scales(groups).astype(int) - 127))


def pairs(codes: Array) -> Array:
    flat = codes.reshape(len(codes), -1)
    return (flat[:, 0::2] + 16 * flat[:, 1::2]).astype(np.uint8)


def nvfp4(*, rounds: bool, is_modelopt: bool = False) -> Make:
    """compressed-tensors stores what divides, ModelOpt what multiplies."""

    def make(module: str, weight: Array) -> Matrix:
        over = np.float32(448 * 6) / np.abs(weight).max()
        whole = np.float32(1) / over
        groups = in_groups(weight, 16)
        local = local_scales(groups, over)
        codes = four_bit_codes(np.clip(groups / (local.astype(np.float32) / over), -6, 6))
        wide = values_of(codes) * local.astype(np.float32) / np.float64(over)
        tensors: dict[str, Array] = {"weight_scale": local[..., 0]}
        if is_modelopt:
            wide = values_of(codes) * local.astype(np.float32) * np.float64(whole)
            tensors |= {"weight": pairs(codes), "weight_scale_2": np.array(whole)}
        else:
            tensors |= {"weight_packed": pairs(codes), "weight_global_scale": over.reshape(1)}
        over_inputs = OVER
        if rounds and is_modelopt:
            tensors["input_scale"] = np.array(np.float32(1) / OVER)
            over_inputs = np.float32(1) / tensors["input_scale"]
        elif rounds:
            tensors["input_global_scale"] = OVER.reshape(1)
        wide = wide.reshape(weight.shape).astype(np.float32)
        return Matrix(tensors, wide, by_local(over_inputs)) if rounds else Matrix(tensors, wide)

    return make


def mxfp4(round_: Round | None) -> Make:
    def make(module: str, weight: Array) -> Matrix:
        groups = in_groups(weight, 32)
        powers = power_scales(groups)
        scale = np.ldexp(np.float32(1), powers.astype(int) - 127)
        codes = four_bit_codes(np.clip(groups / scale, -6, 6))
        wide = (values_of(codes) * scale).reshape(weight.shape).astype(np.float32)
        tensors = {"weight_packed": pairs(codes), "weight_scale": powers[..., 0]}
        return Matrix(tensors, wide) if round_ is None else Matrix(tensors, wide, round_)

    return make
