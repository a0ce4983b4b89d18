"""Finds the request that makes steps fail."""

from collections.abc import Container

from quire.core.limits import SoFar
from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.ipc.journal import Journal, Record, Search
from quire.request import Request

MAX_PROBE_FAULTS = 2
MAX_UNEXPLAINED_FAULTS = 32

# A harmless request of the engine's own. No client can have its id.
PROBE = Request(request_id=-1, prompt=(0,), max_tokens=1)

# By sample of a request: the number of positions after which it is past the fault.
Targets = dict[int, int]


def targets_of(plan: StepPlan, live: Container[int]) -> dict[int, Targets]:
    """The targets of each request in a failed step that has not ended since."""
    targets: dict[int, Targets] = {}
    for chunk in plan.chunks:
        if chunk.request_id in live:
            targets.setdefault(chunk.request_id, {})[chunk.sample] = chunk.start + chunk.length
    return targets


class FaultIsolation:
    """Halves the suspects of a failed step until the request at fault is known.

    Groups of suspects run by themselves, one group after the other. A group that gets past the point where the step
    failed is clear; one that fails again is halved. When a single request fails, a probe runs. If the probe fails too
    the engine is at fault. If it works the request is tried once more, since the fault may have been a passing one. A
    request that fails by itself twice, with a working probe each time, is at fault. The engine is also at fault if
    MAX_UNEXPLAINED_FAULTS steps have failed while no request was found to be at fault and none finished.

    The journal has the requests with a slot, and the search, so that another engine can continue if this one ends.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal | None = None, search: Search | None = None) -> None:
        self._scheduler = scheduler
        self._journal = journal
        self._running: set[int] = set()  # requests that got a slot and may have it still
        search = search or Search()
        self._groups = [list(group) for group in search.groups]  # to be tried; the last is being tried
        self._accused = search.accused  # a probe runs to tell its faults from the engine's
        self._doubtful = search.doubtful  # the request that failed by itself once, while the probe worked
        self._num_probe_faults = search.num_probe_faults
        self._num_unexplained = search.num_unexplained
        self._targets: dict[int, Targets] = {
            suspect: {} for suspect in self.suspects()
        }  # a suspect without any is clear

    def suspects(self) -> list[int]:
        accused = [] if self._accused is None else [self._accused]
        return [suspect for group in self._groups for suspect in group] + accused

    @property
    def is_probing(self) -> bool:
        return self._accused is not None

    @property
    def focus(self) -> list[int] | None:
        """The requests that run now while all others wait; None if all may run."""
        if self.is_probing:
            return [PROBE.request_id]
        return self._groups[-1] if self._groups else None

    @property
    def is_hopeless(self) -> bool:
        """The fault follows no request."""
        return self._num_probe_faults >= MAX_PROBE_FAULTS or self._num_unexplained >= MAX_UNEXPLAINED_FAULTS

    def fault(self, targets: dict[int, Targets]) -> None:
        """A step of these requests failed. No request has a slot."""
        self._running.clear()
        self._num_unexplained += 1
        if self.is_probing:
            self._num_probe_faults += 1
        else:
            self._suspect(targets)
        self._write_journal()

    def _suspect(self, targets: dict[int, Targets]) -> None:
        was_searching = bool(self._groups)
        groups = ([suspect for suspect in group if suspect not in targets] for group in self._groups)
        self._groups = [group for group in groups if group]
        self._targets |= targets
        suspects = list(targets)
        if was_searching and len(suspects) == 1:
            self._accused = suspects[0]
            self._num_probe_faults = 0
        else:
            middle = len(suspects) // 2
            self._groups += [half for half in (suspects[middle:], suspects[:middle]) if half]

    def request_added(self, request: Request, so_far: SoFar, num_under_way: int) -> None:
        """A suspect has come from an engine that ended, with at most `num_under_way` more tokens than `so_far`."""
        if request.request_id in self._targets:
            limit = len(request.prompt) + request.max_tokens - 1  # the last token is never computed
            self._targets[request.request_id] = {
                sample: min(len(request.prompt) + len(tokens) + num_under_way, limit)
                for sample, tokens in enumerate(so_far)
                if tokens is not None
            }

    def step_launched(self, plan: StepPlan) -> None:
        if plan.started and self._journal is not None:
            slots = {start.slot for start in plan.started}
            self._running.update(chunk.request_id for chunk in plan.chunks if chunk.slot in slots)
            self._write_journal()

    def step_worked(self, plan: StepPlan) -> None:
        """A step of this plan has a result."""
        if self._targets:
            for chunk in plan.chunks:
                targets = self._targets.get(chunk.request_id, {})
                if chunk.start + chunk.length >= targets.get(chunk.sample, chunk.start + chunk.length + 1):
                    del targets[chunk.sample]

    def sample_ended(self, request_id: int, sample: int) -> None:
        self._num_unexplained = 0 if request_id != PROBE.request_id else self._num_unexplained
        self._targets.get(request_id, {}).pop(sample, None)

    def request_ended(self, request_id: int) -> None:
        if request_id in self._targets:
            self._targets[request_id].clear()
        if request_id in self._running:
            self._running.discard(request_id)
            if not self._running:
                self._write_journal()  # no request is to blame for what happens from here on

    def probe_worked(self) -> int | None:
        """The request that is then at fault; None if it has another try."""
        assert self._accused is not None
        accused, self._accused = self._accused, None
        if accused != self._doubtful:
            self._doubtful = accused
            self._groups.append([accused])
            return None
        self._doubtful = None
        self._num_unexplained = 0
        return accused

    def advance(self) -> None:
        """Move on to the first group that is not clear, and let it run by itself."""
        while self._groups and not any(self._targets[suspect] for suspect in self._groups[-1]):
            self._groups.pop()
        if self._doubtful not in self.suspects():
            self._doubtful = None
        focus = self.focus
        self._scheduler.focus(focus)
        if focus is None:
            self._targets.clear()
        else:
            self._running.intersection_update(focus)  # the others have lost their slots
        self._write_journal()

    def _write_journal(self) -> None:
        if self._journal is not None:
            groups = [list(group) for group in self._groups]
            search = Search(groups, self._accused, self._doubtful, self._num_probe_faults, self._num_unexplained)
            self._journal.write(Record(list(self._running), search))
