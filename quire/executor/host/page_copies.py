"""The page copies of a plan."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from quire.core.plan import PageCopy, Place, StepPlan, Tier
from quire.executor.host.host_pages import Arrival, Fetched, HostPages
from quire.executor.host.pinned_pages import PinnedPages
from quire.executor.host.stacks import MAX_UNPLACED_BYTES, as_bytes
from quire.executor.pending import Copied
from quire.executor.programs.programs import Programs
from quire.executor.step import COPY_SIZES


class PageCopies:
    """Runs the copies of plans. Owned by the executor, which has the page arrays.

    Pages that come from the host are put into place when something is about to use them, all together: until then the
    steps of others do not wait for the copies, and run no program for them.
    """

    def __init__(self, programs: Programs, host: HostPages | PinnedPages | None) -> None:
        self._programs = programs
        self._host = host
        self._unplaced: list[Fetched] = []  # pages from the host, in the order in which they come
        self._awaited: set[Place] = set()  # where they go

    @property
    def num_awaited(self) -> int:
        """Pages of the device whose contents are on their way from the host."""
        return len(self._awaited)

    def begin(self, pages: Any, plan: StepPlan) -> tuple[Any, list[Copied]]:
        """The page arrays as the chunks of `plan` find them, and what its result must wait for."""
        copied: list[Copied] = []
        if plan.copies or self._awaited:
            pages, copied = self._begin(pages, plan)
        if self._host is not None:
            num_prompt_tokens = sum(chunk.length for chunk in plan.prefills)
            fetches = any(copy.source.tier is Tier.HOST for copy in plan.copies)
            has_decodes = plan.num_prefills < len(plan.chunks)
            self._host.begin_saves(num_prompt_tokens, has_decodes=has_decodes, fetches=fetches)
        return pages, copied

    def _begin(self, pages: Any, plan: StepPlan) -> tuple[Any, list[Copied]]:
        in_order, restores = arrange(plan.copies)
        if self._host is not None:
            self._host.prepare_saves(sum(copy.target.tier is Tier.HOST for copy in in_order))
        copied: list[Copied] = []
        used = {place for copy in plan.copies for place in copy}
        num_fitting = self._num_fitting(restores)
        # Copies in order from the host put all into place that is fetched: none of it may have pages of `restores`.
        is_mixed = any(copy.source.tier is Tier.HOST for copy in in_order)
        if is_mixed or not used.isdisjoint(self._awaited) or num_fitting < len(restores):
            pages, copied = self.settle(pages)
            num_fitting = self._num_fitting(restores)
        first = restores[: max(1, num_fitting)]
        # First: these depend on nothing that the device has still to do.
        coming = self._fetch(first)
        pages, others = self._run(pages, in_order)
        self._await(coming, first)
        copied += [*others, *coming]
        pages, others = self._bring(pages, restores[len(first) :])
        copied += others
        read = {Place(Tier.DEVICE, page) for chunk in plan.chunks for table in chunk.new_pages for page in table}
        if not plan.chunks or not read.isdisjoint(self._awaited):
            pages, arrivals = self.settle(pages, read if plan.chunks else None, coming)
            copied += arrivals
        return pages, copied

    def settle(
        self, pages: Any, read: Set[Place] | None = None, coming: Sequence[Fetched] = ()
    ) -> tuple[Any, list[Copied]]:
        """The page arrays with what came from the host in its places: all of it, or what has pages that are `read`,
        which does not wait for the rest. `coming`: the part of it whose copies have just begun."""
        arrivals: list[Copied] = []
        if self._unplaced:
            assert self._host is not None
            taken = self._unplaced
            if read is not None:
                taken = [fetched for fetched in taken if not read.isdisjoint(fetched.places)]
            num_coming = len(set(coming).intersection(taken))
            for call in self._host.calls(taken, num_coming):
                program = self._programs.get((self._host.kinds[1], len(call.targets)))
                pages, number = program(pages, call.targets, call.contents)
                arrivals.append(Arrival(number))
            self._release(taken)
        return pages, arrivals

    def read(self, pages: Any, sources: Sequence[int]) -> Callable[[], memoryview]:
        """Copy pages to the host that are in their places; the function waits for their bytes."""
        parts = []
        for begin in range(0, len(sources), COPY_SIZES[-1]):
            part = sources[begin : begin + COPY_SIZES[-1]]
            size = next(size for size in COPY_SIZES if size >= len(part))
            padded = np.zeros(size, np.int32)
            padded[: len(part)] = part
            contents = self._programs.get(("save", size))(pages, padded)
            for array in contents:
                array.copy_to_host_async()
            parts.append((len(part), contents))
        return lambda: as_bytes(parts)

    def take_lost(self) -> list[int]:
        """The pages of the host whose copies from the device have failed since the last call."""
        return [] if self._host is None else self._host.take_lost()

    def forget(self) -> None:
        """The page arrays are gone."""
        self._release(self._unplaced)

    def _release(self, done: Sequence[Fetched]) -> None:
        """These are in their places, or are not wanted any more."""
        gone = set(done)
        self._unplaced = [fetched for fetched in self._unplaced if fetched not in gone]
        for fetched in gone:
            self._awaited -= fetched.places
            fetched.contents = []

    def _run(self, pages: Any, copies: Iterable[PageCopy]) -> tuple[Any, list[Copied]]:
        copied: list[Copied] = []
        for run in independent(copies):
            tiers = run[0].source.tier, run[0].target.tier
            if tiers == (Tier.HOST, Tier.DEVICE):
                pages, brought = self._bring(pages, run)
                pages, arrivals = self.settle(pages)
                copied += brought + arrivals
            elif tiers == (Tier.DEVICE, Tier.HOST):
                copied += self._save(pages, run)
            else:
                pages = self._copy_within(pages, run)
        return pages, copied

    def _bring(self, pages: Any, copies: Sequence[PageCopy]) -> tuple[Any, list[Copied]]:
        """Copy pages from the host, of which the last are not put into place. Where all do not fit the memory for
        them together, those before are in their places first."""
        copied: list[Copied] = []
        while copies:
            if self._num_fitting(copies) < len(copies):
                pages, arrivals = self.settle(pages)
                for arrival in arrivals:  # until then their memory is taken
                    arrival.result()
            part = copies[: max(1, self._num_fitting(copies))]
            coming = self._fetch(part)
            self._await(coming, part)
            copied += coming
            copies = copies[len(part) :]
        return pages, copied

    def _num_fitting(self, copies: Sequence[PageCopy]) -> int:
        """The number of copies, from the first of these on, that fit the memory for pages not in their places."""
        if not copies:
            return 0
        assert self._host is not None, "there are no pages of the host"
        room = MAX_UNPLACED_BYTES // self._host.page_bytes - sum(len(fetched.targets) for fetched in self._unplaced)
        return self._host.num_within([copy.source.page for copy in copies], room, self._unplaced)

    def _fetch(self, copies: Sequence[PageCopy]) -> list[Fetched]:
        """Begin to copy pages from the host. What is launched next does not wait for them."""
        if not copies:
            return []
        assert self._host is not None, "there are no pages of the host"
        sources, targets = ([place.page for place in places] for places in zip(*copies, strict=True))
        return self._host.fetch(sources, targets, self._unplaced)

    def _await(self, coming: Sequence[Fetched], copies: Sequence[PageCopy]) -> None:
        self._unplaced += coming
        self._awaited |= {copy.target for copy in copies}

    def _save(self, pages: Any, run: list[PageCopy]) -> Iterator[Copied]:
        assert self._host is not None, "there are no pages of the host"
        begin = 0
        while begin < len(run):
            size, taken = self._host.next_save(len(run) - begin)
            part = run[begin : begin + taken]
            sources = np.zeros(size, np.int32)
            sources[: len(part)] = [copy.source.page for copy in part]
            program = self._programs.get((self._host.kinds[0], size))
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
    device = Tier.DEVICE
    written = {target for _, target in copies if target.tier is not device}
    used: set[Place] = set()  # by copies in order that follow
    in_order: list[PageCopy] = []
    restores: list[PageCopy] = []
    for copy in reversed(copies):
        source, target = copy
        if source.tier is device or source in written or target in used:
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
