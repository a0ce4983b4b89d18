"""The adapters on the device, and the weights that steps take with them."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from quire.executor.programs.compiler import Compiler
from quire.models.adapters import empty, without_adapters


class AdapterArrays:
    """The arrays of all adapter slots, flat. Owned by the engine thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.replace([])

    def clear(self) -> None:
        """Empty all slots."""
        stacks, old = self._compiler.adapters, self._compiler.stacks
        if stacks is None:
            return
        if self.arrays:
            old = jax.tree.unflatten(jax.tree.structure(stacks), self.arrays)
        assert old is not None
        kept = without_adapters(stacks, old)
        if any(isinstance(one, jax.Array) and one.is_deleted() for one in jax.tree.leaves(kept)):
            raise RuntimeError("the weights that have room for adapters are lost")
        del old
        self.replace([])  # frees the others first
        self.replace(jax.tree.leaves(empty(kept)))

    def put(self, program: Callable[..., Any], slot: int, adapter: list[Any]) -> None:
        """Replace the adapter in a slot, by a program. `adapter` is the flat form of `host_adapter`. The program gives
        up arrays that weights may be in, so on one device the adapter is there before: a failed copy costs nothing."""
        if self._compiler.whole is None:
            adapter = jax.block_until_ready(jax.device_put(adapter))  # type: ignore[no-untyped-call]
        self.replace(program(self.arrays, np.int32(slot), adapter))

    def replace(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.weights = (*self._compiler.weights, *arrays)  # that every step takes: the model's and these


def digest_of(adapter: Iterable[Any]) -> str:
    """A digest of the arrays of one adapter, on the host."""
    digest = hashlib.blake2b(digest_size=16)
    for array in adapter:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
