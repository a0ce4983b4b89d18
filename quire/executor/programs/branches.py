"""Branches of a program, taken by a flag on the device, or by one that is known when the program is compiled."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
Flag = jax.Array | bool


def branch(flag: Flag, then: Callable[[jax.Array], T], otherwise: Callable[[jax.Array], T], x: jax.Array) -> T:
    if isinstance(flag, bool):
        return then(x) if flag else otherwise(x)
    result: T = jax.lax.cond(flag, then, otherwise, x)
    return result


def where_asked(asked: Flag, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return branch(asked, change, lambda x: x, x)


def any_of(flags: Sequence[Flag]) -> Flag:
    if any(flag is True for flag in flags):
        return True
    unknown = [flag for flag in flags if not isinstance(flag, bool)]
    return reduce(jnp.logical_or, unknown) if unknown else False
