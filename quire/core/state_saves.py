"""Chooses where the state of slots is saved, so that prefixes continue from there."""

from collections.abc import Iterable
from typing import NamedTuple

from quire.core.limits import Limits
from quire.core.prefix_cache import Match, PrefixCursor
from quire.core.prefix_tree import Node
from quire.core.queue import Queue
from quire.core.sequence import Sequence, State
from quire.core.snapshots import Snapshots


class Saved(NamedTuple):
    """The state of a sequence's slot after the position before `end`, which a step in flight writes to `snapshot`."""

    sequence: Sequence
    epoch: int
    end: int
    snapshot: int
    stays: bool


class StateSaves:
    """Chooses the ends of pages at which the state of a slot goes into a snapshot.

    Two in each prompt stay: where other prompts went on differently, since more may begin like them; and at the end of
    its last whole page. A chunk of the prompt ends there, which costs a step. Others cost none, and of these a sequence
    keeps the last: where a chunk ends anyway, and while it decodes. So a sequence that was preempted goes on, and the
    next turn of a conversation. Two that stay are at least `snapshot_tokens` apart, and one that costs no step is that
    far from the one before it. Owned by `Running`.
    """

    def __init__(self, limits: Limits, snapshots: Snapshots, queue: Queue) -> None:
        self._snapshots = snapshots
        self._queue = queue
        self._page_size = limits.page_size
        self._distance = limits.snapshot_tokens

    def cuts(self, sequence: Sequence, match: Match) -> list[int]:
        """The positions at which the prompt of `sequence`, to start after `match`, is cut for snapshots that stay."""
        size, before, cuts = self._page_size, match.cursor.num_pages * self._page_size, []
        for end in (len(match.path) * size, (len(sequence.tokens) - 1) // size * size):
            if end > before and end >= before + self._distance:
                cuts.append(end)
                before = end
        return cuts

    def begin(self, sequence: Sequence, match: Match, cuts: list[int]) -> None:
        """`sequence` starts after `match`, with its state there."""
        cursor = match.cursor
        sequence.cuts, sequence.rolling = cuts, None
        sequence.snapshot = cursor.end.snapshot if isinstance(cursor.end, Node) else 0
        sequence.saved_end = cursor.num_pages * self._page_size
        sequence.save_at = cuts[0] if cuts else 0

    def decode(self, sequence: Sequence) -> None:
        """All known tokens of `sequence` are planned."""
        self._after(sequence, max(sequence.num_planned + 1, sequence.saved_end + self._distance))

    def _after(self, sequence: Sequence, end: int) -> None:
        """Its next snapshot is at the end of the page that has the position before `end`."""
        sequence.save_at = -(-end // self._page_size) * self._page_size
        sequence.cover(sequence.page_end)

    def aligned(self, sequence: Sequence, length: int) -> int:
        """The tokens of a chunk that is one of several and could have `length`: less, if it then ends with a page and
        far enough from the last snapshot to have one."""
        end = (sequence.num_planned + length) // self._page_size * self._page_size
        if end <= sequence.num_planned or end < sequence.saved_end + self._distance:
            return length
        sequence.save_at = end
        return end - sequence.num_planned

    def save(self, sequence: Sequence) -> Saved | None:
        """The last chunk of `sequence` that was planned ends where its state is saved."""
        end = sequence.save_at
        stays = end in sequence.cuts
        sequence.saved_end = end
        sequence.save_at = sequence.cut_after(end)
        if sequence.state is State.DECODING:
            self._after(sequence, end + max(1, self._distance))
        snapshot = self._snapshots.take()
        if snapshot is None:
            if stays:
                sequence.cuts.remove(end)
                self._queue.promise(sequence, None)  # those that wait for it wait in vain
            return None
        return Saved(sequence, sequence.epoch, end, snapshot, stays)

    def confirm(self, saves: Iterable[tuple[Saved, bool]]) -> None:
        """A step has its result. Whether each sequence had its slot until then, and has published what it computed."""
        for saved, had_slot in saves:
            sequence, node = saved.sequence, None
            if had_slot and sequence.published is not None:
                node = self._node_at(sequence.published, saved.end // self._page_size)
            if node is None:
                self._snapshots.abandon(saved.snapshot)
            else:
                self._enter(saved, node)
            if saved.stays and saved.epoch == sequence.epoch:
                cursor = None if node is None else PrefixCursor(node, saved.end // self._page_size)
                self._queue.promise(sequence, cursor)

    def _enter(self, saved: Saved, node: Node) -> None:
        """And drop the one before it, unless that stays."""
        sequence = saved.sequence
        is_new = self._snapshots.enter(saved.snapshot, node)
        if sequence.rolling is not None:
            before, number = sequence.rolling
            if before.snapshot == number and before is not node:
                self._snapshots.drop(before)
        sequence.rolling = (node, saved.snapshot) if is_new and not saved.stays else None

    @staticmethod
    def _node_at(cursor: PrefixCursor, num_pages: int) -> Node | None:
        """The node after so many pages, if it is in the tree. It is not where a sequence ended before: a step may have
        computed several tokens."""
        node: Node | str | None = cursor.end
        for _ in range(cursor.num_pages - num_pages):
            node = node.parent if isinstance(node, Node) else None
        is_there = isinstance(node, Node) and node.parent is not None and num_pages <= cursor.num_pages
        return node if isinstance(node, Node) and is_there else None
