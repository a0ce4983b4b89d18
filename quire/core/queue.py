"""The sequences that wait."""

from collections.abc import Callable, Iterable

from quire.core.lazy_heap import LazyHeap
from quire.core.limits import Limits
from quire.core.prefix_tree import TOKEN_BYTES, Node, PrefixCursor, packed
from quire.core.sequence import Sequence
from quire.errors import Overloaded
from quire.request import Request
from quire.retry_reservations import MAX_WAIT_S, MIN_WAIT_S, RetryReservations

PageKey = tuple[Node | str, bytes]  # a page to be computed: the end of the prefix before it, and its tokens
PATIENCE = 64  # later prompts pass one that is longer, as long as they have at most so many times its tokens together


class SharedPrefills:
    """One running sequence computes each promised page; others that need it next are parked until it is there.

    So a crowd with one long prefix computes it once. A promise lasts until the sequence has published the page or has
    lost its slot. Where slots have state beside pages, what is promised are the tokens up to the next snapshot that
    stays: in place of a page, all pages up to there. Owned by the queue.
    """

    def __init__(self, page_size: int, has_slot_state: bool = False) -> None:
        self._page_size = page_size
        self._has_slot_state = has_slot_state
        self._lengths: dict[Node | str, list[int]] = {}  # tokens of the promises after a prefix, if slots have state
        self._waiting_for: dict[PageKey, list[Sequence]] = {}
        self._parked: set[Sequence] = set()

    def __len__(self) -> int:
        """The number of parked sequences."""
        return len(self._parked)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._parked

    def promise(self, sequence: Sequence, cursor: PrefixCursor) -> None:
        """`sequence` computes the page after `cursor`."""
        start = cursor.num_pages * self._page_size
        end = sequence.cut_after(start) if self._has_slot_state else start + self._page_size
        if not start < end <= sequence.prompt_end:
            return
        key = cursor.end, packed(sequence.tokens[start:end])
        if key not in self._waiting_for:
            self._waiting_for[key] = []
            sequence.promised = key
            if self._has_slot_state:
                self._lengths.setdefault(cursor.end, []).append(end - start)

    def is_promised(self, sequence: Sequence, cursor: PrefixCursor) -> bool:
        """True if the page after `cursor`, which `sequence` could reuse, is being computed."""
        return self._promised(sequence, cursor) is not None

    def park(self, sequence: Sequence, cursor: PrefixCursor) -> None:
        """`sequence` waits until the page after `cursor`, which is promised, is there."""
        key = self._promised(sequence, cursor)
        assert key is not None
        self._waiting_for[key].append(sequence)
        self._parked.add(sequence)

    def settle(self, sequence: Sequence) -> list[Sequence]:
        """The promise of `sequence` is kept or broken. Returns the sequences that waited for it."""
        if sequence.promised is None:
            return []
        waited = [other for other in self._waiting_for.pop(sequence.promised) if other in self._parked]
        if self._has_slot_state:
            self._forget_length(*sequence.promised)
        sequence.promised = None
        self._parked.difference_update(waited)
        return waited

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        self._parked.discard(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        promised = [sequence.promised for sequence in running if sequence.promised is not None]
        assert len(promised) == len(set(promised)), "two sequences promise one page"
        assert set(promised) == self._waiting_for.keys(), "sequences are parked for a page that none computes"
        waiting = [sequence for parked in self._waiting_for.values() for sequence in parked]
        assert self._parked <= set(waiting), "a parked sequence waits for nothing"
        if self._has_slot_state:
            assert sum(map(len, self._lengths.values())) == len(promised), "the length of a promise is lost"

    def _promised(self, sequence: Sequence, cursor: PrefixCursor) -> PageKey | None:
        """The longest promise after `cursor` that `sequence` could reuse all of; None where there is none."""
        start = cursor.num_pages * self._page_size
        lengths = self._lengths.get(cursor.end, ()) if self._has_slot_state else (self._page_size,)
        usable = sorted({length for length in lengths if start + length <= sequence.num_reusable}, reverse=True)
        if usable:
            tokens = packed(sequence.tokens[start : start + usable[0]])
            for length in usable:
                key = cursor.end, tokens[: length * TOKEN_BYTES]
                if key in self._waiting_for:
                    return key
        return None

    def _forget_length(self, before: Node | str, tokens: bytes) -> None:
        lengths = self._lengths[before]
        lengths.remove(len(tokens) // TOKEN_BYTES)
        if not lengths:
            del self._lengths[before]


class Queue:
    """The order in which sequences start, and the length of the wait.

    Short prompts pass long ones: a sequence is due when PATIENCE times the tokens that it must compute have arrived
    after it, and the first that is due stands first. So no prompt waits for more than that, and of those that wait most
    wait little, where first come first served would let all of them wait for the longest. Short ones are all alike.
    Those that ran before come first, by age.

    A sequence that waits stands in line, or is parked until another has computed a page it needs. No more are parked
    than could run together: the next one that would be stays at the head of the line and holds it up, so that a step
    never looks at more of a long line than that. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._prefills = SharedPrefills(limits.page_size, limits.snapshots is not None)
        self._max_parked = limits.max_batch_size
        self._short_prompt = limits.short_prompt
        self._max_queued = limits.max_queued
        self._reservations = RetryReservations((limits.max_queued or 0) // 2, clock)
        self._clock = clock
        self._line: LazyHeap[Sequence] = LazyHeap()
        self._tokens_arrived = 0  # that prompts must compute
        self._last_admission_s: float | None = None
        self._admission_interval_s = 0.0  # measured while others wait
        self.focus: list[Sequence] | None = None  # the only ones that may start

    def __len__(self) -> int:
        return len(self._line) + len(self._prefills)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._line or sequence in self._prefills

    def head(self) -> Sequence | None:
        """The sequence that starts next."""
        if self.focus is not None:
            return min((one for one in self.focus if one in self._line), key=lambda one: one.age, default=None)
        first = self._line.peek()
        return None if first is None else first[1]

    def refuse_if_full(self, request: Request) -> None:
        """Refuse a request when the queue is full. It has a place if it retries at the given time."""
        most = self._max_queued
        if most is None or (len(self) + request.samples <= most and not self._reservations):
            return
        client = hash((request.prompt, request.max_tokens, request.salt))
        num_kept = self._reservations.num_kept_from(client) if len(self) else 0
        if len(self) + num_kept + request.samples <= most:
            self._reservations.admitted(client)
            return
        retry_after_s = self._reservations.refused(
            client, request.samples, self.retry_after_s(), self._admission_interval_s
        )
        kept = f" and {num_kept} places are kept for clients that retry" if num_kept else ""
        raise Overloaded(f"{len(self)} sequences wait{kept}, the queue takes {most}", retry_after_s)

    def arrive(self, sequence: Sequence, num_tokens: int) -> None:
        """A new sequence, with so many tokens to compute."""
        sequence.due = self._tokens_arrived + PATIENCE * max(num_tokens, self._short_prompt)
        self._tokens_arrived += num_tokens
        self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        self._line.push(sequence.turn, sequence)

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        self._line.discard(sequence)
        self._prefills.leave(sequence)

    def must_park(self, sequence: Sequence, cursor: PrefixCursor) -> bool:
        """True if another computes the page that `sequence`, found in the cache up to `cursor`, needs next."""
        return self._prefills.is_promised(sequence, cursor)

    def park(self, sequence: Sequence, cursor: PrefixCursor) -> bool:
        """Out of the line until that page is there. False when as many are parked as may be."""
        if len(self._prefills) >= self._max_parked:
            return False
        self._line.discard(sequence)
        self._prefills.park(sequence, cursor)
        return True

    def promise(self, sequence: Sequence, cursor: PrefixCursor) -> None:
        """`sequence`, which runs, computes the page after `cursor`: others that need it wait."""
        self._prefills.promise(sequence, cursor)

    def settle(self, sequence: Sequence) -> None:
        """The page that `sequence` promised is there, or will not be: those that waited for it are back in line."""
        for waited in self._prefills.settle(sequence):
            self.push(waited)

    def note_admissions(self, count: int) -> None:
        """Keep the mean time of recent admissions, from which retry times are computed."""
        now = self._clock()
        if self._last_admission_s is not None:
            interval = (now - self._last_admission_s) / count
            self._admission_interval_s += 0.2 * (interval - self._admission_interval_s)
        self._last_admission_s = now if len(self) else None

    def retry_after_s(self) -> float:
        """The time in which the queue, as it is now, empties at the measured rate."""
        return min(max(MIN_WAIT_S, self._admission_interval_s * len(self)), MAX_WAIT_S)

    def check(self, sequences: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        waiting = 0
        for sequence in sequences:
            assert not (sequence in self._line and sequence in self._prefills), f"sequence {sequence.id} waits twice"
            waiting += sequence in self
        assert waiting == len(self), "a sequence waits that is not live"
        assert len(self._prefills) <= self._max_parked
        self._prefills.check(running)
        self._reservations.check()
