"""Pages that are being computed now, and who would rather share them than compute them again."""

from collections.abc import Iterable

from quire.core.prefix_cache import Node, Place, PrefixCache
from quire.core.sequence import Sequence

FillKey = tuple[Node | str, bytes]  # where in the prefix tree a page will stand: after what, and its tokens


class SharedFills:
    """One running sequence computes each promised page; others that need it next are parked until it is there.

    So a crowd with one long prefix computes it once. A promise lasts until the sequence has published the page or has
    lost its slot. Owned by the scheduler.
    """

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._waiting_for: dict[FillKey, list[Sequence]] = {}
        self._parked: set[Sequence] = set()

    def __len__(self) -> int:
        """How many are parked."""
        return len(self._parked)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._parked

    def promise(self, sequence: Sequence, place: Place) -> None:
        """`sequence` computes the page after `place`."""
        if (place.num_pages + 1) * self._page_size > len(sequence.tokens):
            return
        key = place.end, self._cache.key_after(sequence.tokens, place.num_pages)
        if key not in self._waiting_for:
            self._waiting_for[key] = []
            sequence.fill_key = key

    def is_promised(self, sequence: Sequence, place: Place) -> bool:
        """Whether the page after `place`, which `sequence` could reuse, is being computed."""
        return self._page_after(sequence, place) in self._waiting_for

    def park(self, sequence: Sequence, place: Place) -> None:
        """`sequence` waits until the page after `place`, which is promised, is there."""
        page = self._page_after(sequence, place)
        assert page is not None
        self._waiting_for[page].append(sequence)
        self._parked.add(sequence)

    def settle(self, sequence: Sequence) -> list[Sequence]:
        """The promise of `sequence` is kept or broken: those that waited for it."""
        if sequence.fill_key is None:
            return []
        waited = [other for other in self._waiting_for.pop(sequence.fill_key) if other in self._parked]
        sequence.fill_key = None
        self._parked.difference_update(waited)
        return waited

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        self._parked.discard(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        promised = [sequence.fill_key for sequence in running if sequence.fill_key is not None]
        assert len(promised) == len(set(promised)), "two sequences promise one page"
        assert set(promised) == self._waiting_for.keys(), "sequences are parked for a page that nobody computes"
        waiting = [sequence for parked in self._waiting_for.values() for sequence in parked]
        assert self._parked <= set(waiting), "a parked sequence waits for nothing"

    def _page_after(self, sequence: Sequence, place: Place) -> FillKey | None:
        if (place.num_pages + 1) * self._page_size > sequence.num_reusable:
            return None
        return place.end, self._cache.key_after(sequence.tokens, place.num_pages)
