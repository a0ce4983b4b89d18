"""The file of one page.

    magic | length of the header | header | the page's bytes | checksum of all of it

The header is JSON: the key of the weights and settings that the page was computed with, the prefix that it ends, its
page group, and the arrays that its bytes are, each with names, dtype and shape. A reader knows all of that beforehand,
so it compares the header with the one that it would write and parses nothing.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

MAGIC = b"quire page 1\n"
LENGTH_BYTES = 4
CHECKSUM_BYTES = 32

PageName = tuple[bytes, int]  # the digest of the prefix that ends with the page, and the page's group


class ArrayForm(NamedTuple):
    """Arrays of one shape, whose contents in a page follow each other."""

    names: tuple[str, ...]  # of the arrays
    dtype: str
    shape: tuple[int, ...]  # [arrays, page_size, ...]


class BadPageFile(Exception):
    """The file is not the page that its name says."""


class PageFiles:
    """Encodes and checks the files of one model with one set of settings."""

    def __init__(self, key: str, page_size: int, page_bytes: int, arrays: Sequence[ArrayForm]) -> None:
        """`key` names the weights and all settings that the bytes of pages depend on."""
        self.key = key
        self.page_bytes = page_bytes
        self._facts = {
            "key": key,
            "tokens": page_size,
            "bytes": page_bytes,
            "arrays": [one._asdict() for one in arrays],
        }

    def head(self, page: PageName) -> bytes:
        """Everything before the page's bytes."""
        digest, group = page
        header = json.dumps(self._facts | {"prefix": digest.hex(), "group": group}, sort_keys=True).encode()
        return MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + header

    def num_bytes(self, page: PageName) -> int:
        return len(self.head(page)) + self.page_bytes + CHECKSUM_BYTES

    def encode(self, page: PageName, data: memoryview) -> list[bytes | memoryview]:
        """The parts of the file, in order."""
        head = self.head(page)
        assert len(data) == self.page_bytes, f"a page has {len(data)} bytes; it must have {self.page_bytes}"
        return [head, data, _checksum(head, data)]

    def decode(self, page: PageName, contents: memoryview) -> memoryview:
        """The page's bytes. Raises BadPageFile where they are not certainly those that were written."""
        if len(contents) <= CHECKSUM_BYTES or _checksum(contents[:-CHECKSUM_BYTES]) != contents[-CHECKSUM_BYTES:]:
            raise BadPageFile("its checksum is wrong")
        head = self.head(page)
        if contents[: len(head)] != head or len(contents) != self.num_bytes(page):
            raise BadPageFile("it has another page, or was written with other weights or settings")
        return contents[len(head) : -CHECKSUM_BYTES]


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
