"""Nodes of the prefix cache's tree."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

TOKEN_TYPE = "i"  # tokens are packed as C ints, so that a page's key is compared as a block of bytes
TOKEN_BYTES = array(TOKEN_TYPE).itemsize
DIGEST_BYTES = 16
MAX_PACKED = 64  # pages at a time
MAX_SIBLINGS = 32  # the newest pages after a prefix that are compared to find one that begins like the next tokens


class Node:
    """One page of tokens in the tree, with a page of the pool for each group; 0 where a group has none.

    Its tokens are `key`, and the tokens before it are those on the path from the root. A root's key is its salt.
    """

    __slots__ = ("children", "key", "known_digest", "last_used", "pages", "parent", "pins", "snapshot")

    def __init__(self, key: bytes, parent: "Node | None", pages: list[int]) -> None:
        self.pages = pages
        self.key = key
        self.parent = parent  # None for a root, and for a node that has left the tree
        self.children: dict[bytes, Node] = {}
        self.last_used = 0  # or one of those after it, if that is later
        self.pins = 0  # pages of full groups that sequences hold, and children that are pinned
        self.snapshot = 0  # the state of slots after its tokens, where there is one
        self.known_digest: bytes | None = None

    def below(self) -> Iterator["Node"]:
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def digest(self) -> bytes:
        """Names the prefix that ends with this page, salt included, in any process. The node is in the tree."""
        if self.known_digest is not None:
            return self.known_digest
        chain: list[Node] = [self]
        while chain[-1].known_digest is None and (parent := chain[-1].parent) is not None:
            chain.append(parent)
        last = chain.pop()
        digest = last.known_digest = last.known_digest or digest_of_salt(last.key)
        for node in reversed(chain):
            digest = node.known_digest = digest_after(digest, node.key)
        return digest


def encoded(salt: str) -> bytes:
    """Any salt that a client may send, half of a surrogate pair included."""
    return salt.encode(errors="surrogatepass")


def decoded(key: bytes) -> str:
    return key.decode(errors="surrogatepass")


def digest_of_salt(salt: bytes) -> bytes:
    """The digest of the empty prefix."""
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()


def digest_after(before: bytes, key: bytes) -> bytes:
    """The digest of a prefix: of the one without its last page, and of the tokens of that page."""
    return blake2b(before + key, digest_size=DIGEST_BYTES).digest()


def packed(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def page_keys(tokens: Sequence[int], first: int, last: int, page_size: int) -> Iterator[bytes]:
    """The keys of the pages from `first` on, up to `last`. They are packed many at a time, but few where the caller may
    need few."""
    size, count = page_size * TOKEN_BYTES, 1
    while first < last:
        end = min(first + count, last)
        packed_pages = packed(tokens[first * page_size : end * page_size])
        for begin in range(0, len(packed_pages), size):
            yield packed_pages[begin : begin + size]
        first, count = end, min(2 * count, MAX_PACKED)


def partial_page_after(node: Node, tokens: bytes, least: int) -> tuple[Node | None, int]:
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
