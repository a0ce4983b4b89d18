"""Nodes of the prefix cache's tree."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

TOKEN_TYPE = "i"  # tokens are packed as C ints, so that a page's key is compared as a block of bytes
TOKEN_BYTES = array(TOKEN_TYPE).itemsize
MAX_SIBLINGS = 32  # the newest pages after a prefix that are compared to find one that begins like the next tokens


class Node:
    """One page of tokens in the tree, with a page of the pool for each group; 0 where a group has none.

    Its tokens are `key`, and the tokens before it are those on the path from the root. A root's key is its salt.
    """

    __slots__ = ("children", "key", "last_used", "pages", "parent", "pins")

    def __init__(self, key: bytes, parent: "Node | None", pages: list[int]) -> None:
        self.pages = pages
        self.key = key
        self.parent = parent  # None for a root, and for a node that has left the tree
        self.children: dict[bytes, Node] = {}
        self.last_used = 0  # or one of those after it, if that is later
        self.pins = 0  # pages of full groups that sequences hold, and children that are pinned

    def below(self) -> Iterator["Node"]:
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class PrefixCursor(NamedTuple):
    """The end of a prefix in the tree: the node of its last page, or the salt for the empty prefix.

    Holds for as long as the node is in the tree, since what precedes a node leaves after it.
    """

    end: Node | str
    num_pages: int  # in each group that reads all positions


class Match(NamedTuple):
    """A prefix of tokens in the cache. Every group has what going on after `cursor` reads."""

    cursor: PrefixCursor
    path: list[Node]  # at least the nodes up to the cursor
    begun: Node | None = None  # a page after the cursor whose first `num_begun` tokens are those that follow
    num_begun: int = 0


def packed(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def begun_after(node: Node, tokens: bytes, least: int) -> tuple[Node | None, int]:
    """The page after `node` that begins like `tokens`, which are packed, for the longest, and the number of tokens.

    At least `least` tokens, and only among the newest pages; None and 0 where there is none.
    """
    best, most = None, least - 1
    if len(tokens) <= most * TOKEN_BYTES:
        return None, 0
    for key, child in islice(reversed(node.children.items()), MAX_SIBLINGS):
        end = (most + 1) * TOKEN_BYTES
        while end <= len(tokens) and key[:end] == tokens[:end] and all(child.pages):
            best, most, end = child, end // TOKEN_BYTES, end + TOKEN_BYTES
    return best, most if best is not None else 0
