"""Pages in pinned host memory, which a GPU copies from and to by itself.

Every page is an array of its own for each stack, which a program of the device fills (`pin`) or reads (`unpin`): the
host moves no bytes. The arrays never change. A page that is written gets new ones, so a copy under way is not
disturbed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from quire.executor.host_pages import Arrival, Stack, gather_pages, scatter_pages, stacks_of

log = logging.getLogger(__name__)

PINNED_KINDS = ("pin", "unpin")  # programs that copy pages to the host and from it
PINNED, DEVICE = "pinned_host", "device"  # kinds of memory, as JAX names them

PinnedPage = list[jax.Array]  # one for each stack


def can_pin() -> bool:
    """True on GPUs with pinned host memory. A CPU has memory of that kind too, and gains nothing."""
    return jax.default_backend() == "gpu" and pinning_works()


def pinning_works() -> bool:
    """Take a few numbers to pinned memory and back, by programs."""
    device = jax.local_devices()[0]
    pinned, on_device = (SingleDeviceSharding(device, memory_kind=kind) for kind in (PINNED, DEVICE))
    numbers = jnp.arange(8)
    try:
        there = jax.jit(lambda x: x + 1, out_shardings=pinned)(numbers)
        back = jax.jit(lambda x: jax.device_put(x, on_device) + 1)(there)
        is_right = bool(np.array_equal(np.asarray(back), np.arange(8) + 2))
    except Exception as error:  # of any kind: another JAX, another device
        log.warning("host memory is not pinned, so that copies are slow: %s", str(error).partition("\n")[0])
        return False
    return is_right and there.sharding.memory_kind == PINNED


def memory_of(stack: Stack, kind: str) -> Sharding:
    """The place of one page of a stack in memory of this kind."""
    if stack.sharding is None:
        return SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
    spec = PartitionSpec(*stack.sharding.spec[1:])  # type: ignore[no-untyped-call]
    return NamedSharding(stack.sharding.mesh, spec, memory_kind=kind)


def pinned_like(stacks: Sequence[Stack], num_pages: int) -> list[list[jax.ShapeDtypeStruct]]:
    """The structure of `num_pages` on their way to or from the host."""
    page = [
        jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=memory_of(stack, PINNED))  # type: ignore[no-untyped-call]
        for stack in stacks
    ]
    return [page] * num_pages


def pin_pages(stacks: Sequence[Stack], pages: Any, sources: jax.Array) -> list[list[jax.Array]]:
    """The contents of some pages, each for itself. The places of the results are those of `pinned_like`."""
    gathered = gather_pages(stacks, pages, sources)
    return [[one[row] for one in gathered] for row in range(sources.shape[0])]


def unpin_pages(
    stacks: Sequence[Stack], pages: Any, targets: jax.Array, pinned: Sequence[PinnedPage]
) -> tuple[Any, jax.Array]:
    """The page arrays with the contents of `pinned` in some pages, and a number that is there when they are."""
    on_device = [jax.device_put(list(page), [memory_of(stack, DEVICE) for stack in stacks]) for page in pinned]
    return scatter_pages(stacks, pages, targets, [jnp.stack(list(one)) for one in zip(*on_device, strict=True)])


class Pinned:
    """Pages on their way to the host."""

    def __init__(self, pages: list[PinnedPage]) -> None:
        self._pages = pages

    def result(self) -> None:
        jax.block_until_ready(self._pages)  # type: ignore[no-untyped-call]


class PinnedPages:
    """The memory of the host tier on GPUs; `HostPages` says what is expected of it. Owned by the engine thread."""

    def __init__(self, pages: Any, num_pages: int) -> None:
        """`pages`: the structure of the device's page arrays. `num_pages` includes page 0, which is read for
        padding."""
        self.stacks = stacks_of(pages)
        self._places = [memory_of(stack, PINNED) for stack in self.stacks]
        empty = self._put([np.zeros(stack.shape, stack.dtype) for stack in self.stacks])
        self._pages: list[PinnedPage] = [empty] * num_pages  # of which only the first is read before it is written

    @property
    def page_bytes(self) -> int:
        return sum(stack.num_bytes for stack in self.stacks)

    def save(
        self, program: Callable[..., Any], pages: Any, sources: np.ndarray[Any, Any], targets: Sequence[int]
    ) -> Pinned:
        saved = program(pages, sources)[: len(targets)]
        for target, page in zip(targets, saved, strict=True):
            self._pages[target] = page
        return Pinned(saved)

    def restore(
        self, program: Callable[..., Any], pages: Any, sources: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]
    ) -> tuple[Any, Arrival]:
        pages, number = program(pages, targets, [self._pages[source] for source in sources])
        return pages, Arrival(number)

    def read(self, pages: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """The contents of these pages, copied."""
        return [np.stack([np.asarray(self._pages[page][at]) for page in pages]) for at in range(len(self.stacks))]

    def write_bytes(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        for page, contents in zip(pages, data, strict=True):
            begin, arrays = 0, []
            for stack in self.stacks:
                part = np.frombuffer(contents[begin : begin + stack.num_bytes], stack.dtype).reshape(stack.shape)
                arrays.append(part.copy())  # it may be read after this call
                begin += stack.num_bytes
            self._pages[page] = self._put(arrays)

    def drain(self) -> None:
        """Nothing arrives late: a page that a failed step wrote is one that no other step reads."""

    def close(self) -> None:
        self._pages.clear()

    def _put(self, arrays: Sequence[np.ndarray[Any, Any]]) -> PinnedPage:
        return [jax.device_put(one, place) for one, place in zip(arrays, self._places, strict=True)]
