"""Finds the request that makes steps fail."""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.core.plan import StepPlan
from quire.ipc.journal import Search
from quire.request import Request

MAX_PROBE_FAULTS = 2
MAX_UNEXPLAINED_FAULTS = 32

# A harmless request of the engine's own. No client can have its id.
PROBE = Request(request_id=-1, prompt=(0,), max_tokens=1)

NumComputed = Callable[[int, int], int | None]  # positions computed, by request and sample; None once it has ended


@dataclass
class Suspect:
    """A request with a part in a failed step."""

    request_id: int
    targets: dict[int, int] = field(default_factory=dict)  # by sample: the positions that get it past the fault

    def is_clear(self, num_computed: NumComputed) -> bool:
        computed = ((num_computed(self.request_id, sample), target) for sample, target in self.targets.items())
        return all(count is None or count >= target for count, target in computed)


def suspects_of(plan: StepPlan, is_live: Callable[[int], bool]) -> list[Suspect]:
    """The requests in a step that failed, but for those that have ended since."""
    suspects: dict[int, Suspect] = {}
    for chunk in plan.chunks:
        if is_live(chunk.request_id):
            suspect = suspects.setdefault(chunk.request_id, Suspect(chunk.request_id))
            suspect.targets[chunk.sample] = chunk.start + chunk.length
    return list(suspects.values())


class FaultIsolation:
    """Halves the suspects of a failed step until the one at fault is known.

    Groups of suspects run alone, one group after the other. A group that gets past the point where the step failed is
    clear; one that fails again is halved. A request that fails on its own stands accused, and a probe runs: when that
    fails too the engine is at fault, when it works the request is tried once more, since the fault may have been a
    passing one. A request that fails alone and with a working probe twice is guilty. The engine is also held to be at
    fault when MAX_UNEXPLAINED_FAULTS steps have failed while nobody was found guilty and no request finished.
    """

    def __init__(self, search: Search | None = None) -> None:
        search = search or Search()
        # Still to be tried; the last is being tried.
        self._groups: list[list[Suspect]] = [[Suspect(one) for one in group] for group in search.groups]
        # A probe runs to tell its faults from the engine's.
        self._accused: Suspect | None = None if search.accused is None else Suspect(search.accused)
        self._doubtful = search.doubtful  # the request that failed alone once, while the probe worked
        self._num_probe_faults = search.num_probe_faults
        self._num_unexplained = search.num_unexplained

    @property
    def search(self) -> Search:
        return Search(
            [[suspect.request_id for suspect in group] for group in self._groups],
            None if self._accused is None else self._accused.request_id,
            self._doubtful,
            self._num_probe_faults,
            self._num_unexplained,
        )

    def suspects(self) -> list[Suspect]:
        accused = [] if self._accused is None else [self._accused]
        return [suspect for group in self._groups for suspect in group] + accused

    @property
    def is_probing(self) -> bool:
        return self._accused is not None

    @property
    def is_counting(self) -> bool:
        """Whether there are faults that nobody has been found guilty of."""
        return self._num_unexplained > 0

    @property
    def focus(self) -> list[int] | None:
        """The requests that run now while everyone else waits; None when all may run."""
        if self.is_probing:
            return [PROBE.request_id]
        return [suspect.request_id for suspect in self._groups[-1]] if self._groups else None

    @property
    def is_hopeless(self) -> bool:
        """Whether the fault follows no request."""
        return self._num_probe_faults >= MAX_PROBE_FAULTS or self._num_unexplained >= MAX_UNEXPLAINED_FAULTS

    def fault(self, suspects: list[Suspect]) -> None:
        """A step of these failed."""
        self._num_unexplained += 1
        if self.is_probing:
            self._num_probe_faults += 1
            return
        was_searching = bool(self._groups)
        blamed = {suspect.request_id for suspect in suspects}
        groups = ([one for one in group if one.request_id not in blamed] for group in self._groups)
        self._groups = [group for group in groups if group]
        if was_searching and len(suspects) == 1:
            self._accused = suspects[0]
            self._num_probe_faults = 0
        else:
            middle = len(suspects) // 2
            self._groups += [half for half in (suspects[middle:], suspects[:middle]) if half]

    def probe_worked(self) -> int | None:
        """The request that is guilty then; None when it has another try."""
        assert self._accused is not None
        accused, self._accused = self._accused, None
        if accused.request_id != self._doubtful:
            self._doubtful = accused.request_id
            self._groups.append([accused])
            return None
        self._doubtful = None
        self._num_unexplained = 0
        return accused.request_id

    def request_finished(self) -> None:
        self._num_unexplained = 0

    def advance(self, num_computed: NumComputed) -> None:
        """Move on to the first group that is not clear."""
        while self._groups and all(suspect.is_clear(num_computed) for suspect in self._groups[-1]):
            self._groups.pop()
