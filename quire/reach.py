"""The positions that a layer reads, by which its pages are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkReach:
    """A position reads the positions of its own chunk, up to itself. A chunk has `size` positions."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


# All positions, the last so many (the position itself included), or those of a chunk.
Reach = int | ChunkReach | None


def first_read(reach: int | ChunkReach, position: int) -> int:
    """The first position that `position` reads. None of those before it is read by a later one either."""
    if isinstance(reach, ChunkReach):
        return position - position % reach.size
    return max(0, position - reach + 1)


def first_page(reach: int | ChunkReach, position: int, page_size: int) -> int:
    """The first page that `position` reads."""
    return first_read(reach, position) // page_size


def most_read(reach: int | ChunkReach) -> int:
    """The most positions that one reads."""
    return reach.size if isinstance(reach, ChunkReach) else reach


def in_tokens(reach: int | ChunkReach) -> str:
    return str(reach) if isinstance(reach, ChunkReach) else f"{reach} tokens"


def in_words(reach: Reach) -> str:
    if reach is None:
        return "full"
    return str(reach) if isinstance(reach, ChunkReach) else f"window {reach}"
