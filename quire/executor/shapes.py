"""The sizes that device arrays and compiled programs are made for."""

from dataclasses import dataclass, replace
from functools import cached_property

from quire.executor.buckets import Buckets


@dataclass(frozen=True)
class Shapes:
    num_pages: int
    page_size: int
    num_slots: int
    max_prefill_tokens: int
    max_sequence_tokens: int
    min_rows: int = 1  # smaller decodes are padded to so many rows
    min_groups: int = 1  # smaller prefills are padded to so many groups
    most_alone: int = 0  # prompts that have programs of their own where a step is theirs alone; 0: there are none
    alone_from: int = 64  # groups, from which on they do
    burst: int = 1  # decodes that one program does after each other; 1: no such program

    def with_pages(self, num_pages: int) -> "Shapes":
        return replace(self, num_pages=num_pages)

    @property
    def history_size(self) -> int:
        """Tokens of a slot; one more than a sequence has, for the one that is sampled after its last."""
        return self.max_sequence_tokens + 1

    @property
    def table_size(self) -> int:
        """Pages of a slot."""
        return -(-self.max_sequence_tokens // self.page_size)

    @cached_property
    def buckets(self) -> Buckets:
        return Buckets(
            self.num_slots,
            self.max_prefill_tokens,
            self.min_rows,
            self.min_groups,
            self.most_alone,
            self.alone_from,
        )
