"""Snapshots of the state that slots have beside their pages."""

from quire.core.prefix_tree import Node


class Snapshots:
    """The numbers of the snapshots on the device, from 1 on.

    Each is free, belongs to one node of the prefix tree, or is written by a step in flight. That of a node is the state
    of a slot after the tokens up to the end of the node's page. Steps run in order, so that a number may be written
    again by a later step than one in flight that reads it. Owned by the prefix cache.
    """

    def __init__(self, count: int) -> None:
        self.num_usable = count
        self._free = list(range(count, 0, -1))
        self._node_of: dict[int, Node] = {}  # the least recently used first
        self._written: set[int] = set()  # by steps in flight

    def __len__(self) -> int:
        """The snapshots that prefixes can continue from."""
        return len(self._node_of)

    @property
    def is_balanced(self) -> bool:
        """True if, when no step is in flight, every number is free or belongs to a node."""
        return len(self._free) + len(self._node_of) == self.num_usable

    def take(self) -> int | None:
        """A snapshot for a step to write, given up by the least recently used node if none is free. None while steps in
        flight write all of them."""
        if not self._free and self._node_of:
            self.drop(next(iter(self._node_of.values())))
        if not self._free:
            return None
        number = self._free.pop()
        self._written.add(number)
        return number

    def enter(self, number: int, node: Node) -> bool:
        """A step has written `number`: the state after `node`. False, and it is free again, where the node has a
        snapshot already."""
        if node.snapshot:
            self.abandon(number)
            return False
        self._written.remove(number)
        node.snapshot = number
        self._node_of[number] = node
        return True

    def abandon(self, number: int) -> None:
        """Nothing can use what a step has written there."""
        self._written.remove(number)
        self._free.append(number)

    def abandon_all(self) -> None:
        """Steps in flight have no results."""
        for number in list(self._written):
            self.abandon(number)

    def touch(self, node: Node) -> None:
        """A prefix that continues from the snapshot of `node` was used."""
        self._node_of[node.snapshot] = self._node_of.pop(node.snapshot)

    def drop(self, node: Node) -> None:
        """`node` has no snapshot from now on, if it had one."""
        if node.snapshot:
            del self._node_of[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = 0

    def check(self) -> None:
        numbers = [*self._free, *self._node_of, *self._written]
        assert sorted(numbers) == list(range(1, self.num_usable + 1)), "a snapshot is lost or owned twice"
        assert all(node.snapshot == number for number, node in self._node_of.items())
        assert all(node.parent is not None for node in self._node_of.values()), "a snapshot is of no prefix"
