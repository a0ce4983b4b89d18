"""The sequences that wait."""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from operator import attrgetter

from quire.core.lazy_heap import LazyHeap
from quire.core.limits import Limits
from quire.core.prefix_cache import PrefixCursor
from quire.core.prefix_tree import TOKEN_BYTES, Node, packed
from quire.core.sequence import Sequence
from quire.errors import Overloaded
from quire.request import Request
from quire.retry_reservations import MAX_WAIT_S, MIN_WAIT_S, RetryReservations

PageKey = tuple[Node | str, bytes]  # a page to be computed: the end of the prefix before it, and its tokens
PATIENCE = 64  # later prompts pass one that is longer, as long as they have at most so many times its tokens together
_age = attrgetter("age")


class Promise:
    """A running sequence computes a page and those after it, which others wait for."""

    __slots__ = ("_packed_prompt", "sequence", "waiting")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.waiting: list[tuple[int, int, Sequence]] = []  # a heap: the pages that each needs, and its id
        self._packed_prompt = b""

    def num_pages_for(self, sequence: Sequence, num_pages: int, page_size: int) -> int:
        """The pages of the promised prompt that `sequence` can use. It has the first `num_pages`, and the next too."""
        if not self._packed_prompt:
            self._packed_prompt = packed(self.sequence.tokens[: self.sequence.prompt_end])
        size = page_size * TOKEN_BYTES
        promised = memoryview(self._packed_prompt)[num_pages * size :]
        wanted = packed(sequence.tokens[num_pages * page_size : sequence.num_reusable])
        low, high = 1, min(len(promised), len(wanted)) // size
        while low < high:  # the first `low` pages are the same, and those after `high` are not
            middle = (low + high + 1) // 2
            is_same = promised[low * size : middle * size] == wanted[low * size : middle * size]
            low, high = (middle, high) if is_same else (low, middle - 1)
        return num_pages + low


class SharedPrefills:
    """One running sequence computes each promised page; others that need it next are parked until it is there.

    So a crowd with one long prefix computes it once. They need not look each time a page is there: one is parked until
    all pages are there that its prompt shares with that of the running sequence. A promise lasts until the sequence has
    published its prompt or has lost its slot. Where slots have state beside pages, what is promised are the tokens up
    to the next snapshot that stays: in place of a page, all pages up to there. Owned by the queue.
    """

    def __init__(self, page_size: int, has_slot_state: bool = False) -> None:
        self._page_size = page_size
        self._has_slot_state = has_slot_state
        self._lengths: dict[Node | str, list[int]] = {}  # tokens of the promises after a prefix, if slots have state
        self._promises: dict[PageKey, Promise] = {}
        self._parked: set[Sequence] = set()

    def __len__(self) -> int:
        """The number of parked sequences."""
        return len(self._parked)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._parked

    def promise(self, sequence: Sequence, cursor: PrefixCursor | None) -> list[Sequence]:
        """`sequence` has published its pages up to `cursor` and computes the next; None: it computes no more of them.
        Returns the sequences that waited for no more than that, or wait in vain."""
        before = None if sequence.promised is None else self._take_back(sequence.promised)
        sequence.promised = None if cursor is None else self._key_after(sequence, cursor)
        if cursor is None or sequence.promised is None or sequence.promised in self._promises:
            sequence.promised = None
            return [] if before is None else self._wake(before)
        promise = self._give(sequence.promised, before or Promise(sequence))
        return self._wake(promise, cursor.num_pages)

    def promised_to(self, sequence: Sequence, cursor: PrefixCursor) -> PageKey | None:
        """The longest promise of what follows `cursor` that `sequence` could reuse; None where there is none."""
        start = cursor.num_pages * self._page_size
        lengths = self._lengths.get(cursor.end, ()) if self._has_slot_state else (self._page_size,)
        usable = sorted({length for length in lengths if start + length <= sequence.num_reusable}, reverse=True)
        if usable:
            tokens = packed(sequence.tokens[start : start + usable[0]])
            for length in usable:
                key = cursor.end, tokens[: length * TOKEN_BYTES]
                if key in self._promises:
                    return key
        return None

    def park(self, sequence: Sequence, cursor: PrefixCursor, promised: PageKey) -> None:
        """`sequence`, found in the cache up to `cursor`, waits for what is promised."""
        promise = self._promises[promised]
        if self._has_slot_state:
            num_pages = cursor.num_pages + len(promised[1]) // (self._page_size * TOKEN_BYTES)
        else:
            num_pages = promise.num_pages_for(sequence, cursor.num_pages, self._page_size)
        heappush(promise.waiting, (num_pages, sequence.id, sequence))
        self._parked.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        self._parked.discard(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        promised = {sequence.promised: sequence for sequence in running if sequence.promised is not None}
        given = {key: promise.sequence for key, promise in self._promises.items()}
        assert given == promised, "sequences are parked for a page that none computes"
        waiting = {sequence for promise in self._promises.values() for _, _, sequence in promise.waiting}
        assert self._parked <= waiting, "a parked sequence waits for nothing"
        if self._has_slot_state:
            assert sum(map(len, self._lengths.values())) == len(promised), "the length of a promise is lost"

    def _key_after(self, sequence: Sequence, cursor: PrefixCursor) -> PageKey | None:
        """The page after `cursor`, or the tokens up to the next snapshot, of the prompt that `sequence` computes."""
        start = cursor.num_pages * self._page_size
        end = sequence.cut_after(start) if self._has_slot_state else start + self._page_size
        return (cursor.end, packed(sequence.tokens[start:end])) if start < end <= sequence.prompt_end else None

    def _give(self, key: PageKey, promise: Promise) -> Promise:
        self._promises[key] = promise
        if self._has_slot_state:
            self._lengths.setdefault(key[0], []).append(len(key[1]) // TOKEN_BYTES)
        return promise

    def _take_back(self, key: PageKey) -> Promise:
        if self._has_slot_state:
            before, tokens = key
            self._lengths[before].remove(len(tokens) // TOKEN_BYTES)
            if not self._lengths[before]:
                del self._lengths[before]
        return self._promises.pop(key)

    def _wake(self, promise: Promise, num_pages: int | None = None) -> list[Sequence]:
        """Those that wait for no more than `num_pages`, or all."""
        waiting, woken = promise.waiting, []
        while waiting and (num_pages is None or waiting[0][0] <= num_pages):
            sequence = heappop(waiting)[2]
            if sequence in self._parked:  # and has not ended
                self._parked.discard(sequence)
                woken.append(sequence)
        return woken


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
            return min((chosen for chosen in self.focus if chosen in self._line), key=_age, default=None)
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

    def promised_to(self, sequence: Sequence, cursor: PrefixCursor) -> PageKey | None:
        """The promise of another that `sequence`, found in the cache up to `cursor`, needs next."""
        return self._prefills.promised_to(sequence, cursor)

    def park(self, sequence: Sequence, cursor: PrefixCursor, promised: PageKey) -> bool:
        """Out of the line until what is promised is there. False when as many are parked as may be."""
        if len(self._prefills) >= self._max_parked:
            return False
        self._line.discard(sequence)
        self._prefills.park(sequence, cursor, promised)
        return True

    def promise(self, sequence: Sequence, cursor: PrefixCursor | None) -> None:
        """`sequence`, which runs, has its pages up to `cursor` and computes the next: others that need them wait. None:
        it computes no more of them. Those that need not wait any more are back in line."""
        for woken in self._prefills.promise(sequence, cursor):
            self.push(woken)

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
