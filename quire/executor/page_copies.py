"""The page copies of a plan."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from quire.core.plan import PageCopy, Place, StepPlan, Tier
from quire.executor.host_pages import Arrival, Fetched, HostPages
from quire.executor.pending import Copied
from quire.executor.pinned_pages import PinnedPages
from quire.executor.program_table import COPY_SIZES
from quire.executor.programs import Programs

MAX_UNPLACED_BYTES = 512 * 2**20


class OnTheWay:
    """Pages on their way from the host to the device."""

    def __init__(self, fetched: list[Fetched]) -> None:
        self._contents = [one.contents for one in fetched]

    def result(self) -> None:
        jax.block_until_ready(self._contents)  # type: ignore[no-untyped-call]


class PageCopies:
    """Runs the copies of plans. Owned by the executor, which has the page arrays.

    Pages that come from the host are put into place when something is about to use them, all together: until then the
    steps of others do not wait for the copies, and run no program for them.
    """

    def __init__(
        self, programs: Programs, host: HostPages | PinnedPages | None, host_kinds: Sequence[str] = ()
    ) -> None:
        """`host_kinds`: the programs that take pages to the host and from it."""
        self._programs = programs
        self._host = host
        self._host_kinds = host_kinds
        self._unplaced: list[Fetched] = []
        self._awaited: set[Place] = set()  # where they go

    def begin(self, pages: Any, plan: StepPlan) -> tuple[Any, list[Copied]]:
        """The page arrays as the chunks of `plan` find them, and what its result must wait for."""
        if not plan.copies and not self._awaited:
            return pages, []
        in_order, restores = arrange(plan.copies)
        copied: list[Copied] = []
        used = {place for copy in plan.copies for place in copy}
        if not used.isdisjoint(self._awaited):
            pages, copied = self.settle(pages)
        if restores:  # before all others, which the device need not wait for to begin with them
            fetched = self._fetch(restores)
            copied.append(OnTheWay(fetched))
        pages, others = self._run(pages, in_order)
        copied += others
        if restores:
            self._unplaced += fetched
            self._awaited |= {copy.target for copy in restores}
        read = {Place(Tier.DEVICE, page) for chunk in plan.chunks for table in chunk.new_pages for page in table}
        if not plan.chunks or not read.isdisjoint(self._awaited):
            pages, arrivals = self.settle(pages)
            copied += arrivals
        return pages, copied

    def end(self, pages: Any) -> Any:
        """The page arrays after the chunks. Pages that are not in their places take up memory of the device."""
        if self._host is None or len(self._awaited) * self._host.page_bytes <= MAX_UNPLACED_BYTES:
            return pages
        return self.settle(pages)[0]

    def settle(self, pages: Any) -> tuple[Any, list[Copied]]:
        """The page arrays with all that came from the host in its places."""
        arrivals: list[Copied] = []
        if self._unplaced:
            assert self._host is not None
            for call in self._host.calls(self._unplaced):
                program = self._programs.get((self._host_kinds[1], len(call.targets)))
                pages, number = program(pages, call.targets, call.contents)
                arrivals.append(Arrival(number))
            self.forget()
        return pages, arrivals

    def forget(self) -> None:
        """The page arrays are gone."""
        self._unplaced.clear()
        self._awaited.clear()

    def _run(self, pages: Any, copies: Iterable[PageCopy]) -> tuple[Any, list[Copied]]:
        copied: list[Copied] = []
        for run in independent(copies):
            tiers = run[0].source.tier, run[0].target.tier
            if tiers == (Tier.HOST, Tier.DEVICE):
                self._unplaced += self._fetch(run)
                pages, arrivals = self.settle(pages)
                copied += arrivals
            elif tiers == (Tier.DEVICE, Tier.HOST):
                copied += self._save(pages, run)
            else:
                pages = self._copy_within(pages, run)
        return pages, copied

    def _fetch(self, copies: Sequence[PageCopy]) -> list[Fetched]:
        """Begin to copy pages from the host. What is launched next does not wait for them."""
        assert self._host is not None, "there are no pages of the host"
        return self._host.fetch([copy.source.page for copy in copies], [copy.target.page for copy in copies])

    def _save(self, pages: Any, run: list[PageCopy]) -> Iterator[Copied]:
        assert self._host is not None, "there are no pages of the host"
        begin = 0
        while begin < len(run):
            size, taken = self._host.next_save(len(run) - begin)
            part = run[begin : begin + taken]
            sources = np.zeros(size, np.int32)
            sources[: len(part)] = [copy.source.page for copy in part]
            program = self._programs.get((self._host_kinds[0], size))
            yield self._host.save(program, pages, sources, [copy.target.page for copy in part])
            begin += taken

    def _copy_within(self, pages: Any, run: list[PageCopy]) -> Any:
        begin = 0
        while begin < len(run):
            size = self._programs.table.copy_size(min(len(run) - begin, COPY_SIZES[-1]))
            part = run[begin : begin + size]
            packed = np.zeros((size, 2), np.int32)  # page 0 onto itself
            packed[: len(part)] = [(copy.source.page, copy.target.page) for copy in part]
            pages = self._programs.get(("copy", size))(pages, packed)
            begin += size
        return pages


def arrange(copies: Sequence[PageCopy]) -> tuple[list[PageCopy], list[PageCopy]]:
    """The copies that run in their order, and those from the host that may begin before them and end after them: no
    other copy uses the page that they go to, or writes the one that they come from."""
    written = {copy.target for copy in copies if copy.target.tier is Tier.HOST}
    used: set[Place] = set()  # by copies in order that follow
    in_order: list[PageCopy] = []
    restores: list[PageCopy] = []
    for copy in reversed(copies):
        if copy.source.tier is Tier.DEVICE or copy.source in written or copy.target in used:
            in_order.append(copy)
            used.update(copy)
        else:
            restores.append(copy)
    return in_order[::-1], restores[::-1]


def independent(copies: Iterable[PageCopy]) -> Iterator[list[PageCopy]]:
    """Runs of copies between the same tiers, none of which reads or writes a page that one before it in the run
    writes."""
    run: list[PageCopy] = []
    written: set[Place] = set()
    for copy in copies:
        is_alike = not run or (run[0].source.tier, run[0].target.tier) == (copy.source.tier, copy.target.tier)
        if not is_alike or not written.isdisjoint(copy):
            yield run
            run, written = [], set()
        run.append(copy)
        written.add(copy.target)
    if run:
        yield run
