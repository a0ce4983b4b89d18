"""Pages in ordinary memory of the host."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from quire.core.plan import Place, Tier
from quire.executor.host.stacks import HOST_COPY_SIZES, stacks_of
from quire.ops.sharding import put

HostArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(eq=False, slots=True)
class Fetched:
    """Pages on their way from the host, or on the device and not in their places."""

    targets: HostArray  # 0: nowhere
    # As the program that puts them into place takes them. Empty once it has: their memory must not last as long as the
    # step that fetched them.
    contents: list[Any]
    block: object = None  # of the host that they are, if it has blocks

    @property
    def places(self) -> set[Place]:
        return {Place(Tier.DEVICE, page) for page in self.targets.tolist() if page}

    def result(self) -> None:
        jax.block_until_ready(self.contents)  # type: ignore[no-untyped-call]


class Arrival:
    """Pages on their way to the device. The host does not read the number: its copy would wait behind pages that go to
    the host."""

    def __init__(self, number: jax.Array) -> None:
        self._number = number  # there when they are

    def result(self) -> None:
        jax.block_until_ready(self._number)  # type: ignore[no-untyped-call]


class HostPages:
    """The memory of the host tier. Owned by the engine thread; a thread of its own writes what comes from the device.

    A page is read and written by its number alone; the scheduler knows what it has, and whether it may be read.
    """

    kinds = ("save", "restore")  # programs that copy pages to the host and from it
    sizes = HOST_COPY_SIZES  # pages that one call can copy

    def __init__(self, pages: Any, num_pages: int) -> None:
        """`pages`: the structure of the device's page arrays. `num_pages` includes page 0, which takes what is copied
        for padding."""
        self.stacks = stacks_of(pages)
        # Zeros whose memory the system gives when it is first written.
        self._arrays: list[HostArray] = [np.zeros((num_pages, *stack.shape), stack.dtype) for stack in self.stacks]
        self._writer = ThreadPoolExecutor(1, "quire-host-pages")
        self._writing: list[Future[None]] = []

    @property
    def page_bytes(self) -> int:
        return sum(stack.num_bytes for stack in self.stacks)

    def next_save(self, count: int) -> tuple[int, int]:
        """The size of the program that saves the first of `count` pages, and how many of them it saves."""
        size = next((size for size in self.sizes if size >= count), self.sizes[-1])
        return size, min(count, size)

    def save(
        self, program: Callable[..., Any], pages: Any, sources: HostArray, targets: Sequence[int]
    ) -> "Future[None]":
        """Copy pages of the device, by a program under way. `sources` has padding, `targets` has none."""
        return self.write_when_ready(targets, program(pages, sources))

    def prepare_saves(self, num_pages: int) -> None:
        """So many will be saved by the next step."""

    def begin_saves(self, num_prompt_tokens: int, has_decodes: bool, fetches: bool = False) -> None:
        """A step with so many tokens of prompts is launched next, and may fetch pages from here."""

    def take_lost(self) -> list[int]:
        """The pages whose copies from the device have failed since the last call. A copy that fails here fails its
        step."""
        return []

    def num_within(self, sources: Sequence[int], max_rows: int, before: Sequence[Fetched] = ()) -> int:
        """The number of pages, from the first of these on, that `fetch` takes to the device in at most so many rows."""
        size = max((size for size in self.sizes if size <= max_rows), default=0)
        return min(len(sources), size * max(1, max_rows // self.sizes[-1]))

    def fetch(self, sources: Sequence[int], targets: Sequence[int], before: Sequence[Fetched] = ()) -> list[Fetched]:
        """Begin to copy pages to the device, where they go to these. `before`: what is there and not in its place."""
        calls = []
        for begin in range(0, len(sources), self.sizes[-1]):
            run = list(sources[begin : begin + self.sizes[-1]])
            size = next(size for size in self.sizes if size >= len(run))
            padding = [0] * (size - len(run))
            read = zip(self.read(run + padding), self.stacks, strict=True)
            places = np.array([*targets[begin : begin + len(run)], *padding], np.int32)
            calls.append(Fetched(places, [put(array, stack.sharding) for array, stack in read]))
        return calls

    def calls(self, fetched: list[Fetched], num_coming: int = 0) -> list[Fetched]:
        """The calls that put what was fetched into place. The last `num_coming` are on their way still."""
        return fetched

    def read(self, pages: "Sequence[int] | HostArray") -> list[HostArray]:
        """The contents of these pages, copied."""
        return [array[list(pages)] for array in self._arrays]

    def write(self, pages: Sequence[int], stacks: Sequence[HostArray]) -> None:
        """`stacks` have at least as many rows as there are pages."""
        for array, contents in zip(self._arrays, stacks, strict=True):
            for row, page in enumerate(pages):
                array[page] = contents[row]

    def write_bytes(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        """Write pages that come from another engine, as `as_bytes` gives them."""
        for page, contents in zip(pages, data, strict=True):
            begin = 0
            for array in self._arrays:
                end = begin + array[page].nbytes
                array[page] = np.frombuffer(contents[begin:end], array.dtype).reshape(array.shape[1:])
                begin = end

    def write_when_ready(self, pages: Sequence[int], stacks: Sequence[jax.Array]) -> "Future[None]":
        """Write what a program under way computes. Writes happen in the order of the calls."""
        for array in stacks:
            array.copy_to_host_async()
        self._writing = [writing for writing in self._writing if not writing.done()]
        self._writing.append(self._writer.submit(lambda: self.write(pages, [np.asarray(array) for array in stacks])))
        return self._writing[-1]

    def drain(self) -> None:
        """Wait until nothing is being written, so that what failed steps copied does not arrive later."""
        for writing in self._writing:
            writing.exception()
        self._writing.clear()

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)
