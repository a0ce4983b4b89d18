"""The sizes that device arrays and compiled programs are made for."""

from dataclasses import dataclass, replace
from functools import cached_property

from quire.executor.programs.ladder import Ladder
from quire.models.adapters import AdapterSizes


@dataclass(frozen=True)
class Shapes:
    num_pages: int
    page_size: int
    num_slots: int
    max_prefill_tokens: int
    max_sequence_tokens: int
    num_groups: int = 1  # of pages
    min_tokens: int = 1  # smaller steps are padded to this many, but for a decode that is alone in a fine ladder
    is_fine: bool = False  # whether the ladder of tokens is: see ladder.py
    skips_padding: bool = False  # whether kernels do
    specialised: bool = False  # common cases have programs of their own: decodes only, and each way of sampling
    max_fresh_sequences: int = 0  # in programs for new sequences only; 0: there are none
    fresh_from: int = 2048  # tokens, from which on there are such programs
    adapters: AdapterSizes = AdapterSizes()
    guesses: int = 0  # of the next tokens of a sequence, in one step; 0: lengths are not kept on the device
    step_guesses: int = 0  # of all sequences
    page_dtype: str | None = None  # of keys and values; None: that of activations
    burst: int = 1  # decodes that one program does after each other; 1: no such program
    num_snapshots: int = 0  # of the state that slots have beside pages
    # Page groups that keep all positions, where decodes read the pages that they share together; (): they do not.
    shared_groups: tuple[int, ...] = ()
    # The numbers of a row are added in one order in every program, and each program is held to that before it is used.
    fixed_order: bool = False

    def with_pages(self, num_pages: int) -> "Shapes":
        return replace(self, num_pages=num_pages)

    @property
    def history_size(self) -> int:
        """Tokens of a slot; one more than a sequence has, for the one that is sampled after its last."""
        return self.max_sequence_tokens + 1

    @property
    def table_size(self) -> int:
        """Pages of a slot in each group."""
        return -(-self.max_sequence_tokens // self.page_size)

    @property
    def num_samples(self) -> int:
        """Tokens that a step can sample: one of each slot, and one after each guess."""
        return self.num_slots + self.step_guesses

    @cached_property
    def ladder(self) -> Ladder:
        return Ladder(
            self.num_slots,
            self.max_prefill_tokens,
            min_tokens=self.min_tokens,
            is_fine=self.is_fine,
            skips_padding=self.skips_padding,
            has_decodes=self.specialised,
            max_fresh_sequences=self.max_fresh_sequences,
            fresh_from=self.fresh_from,
            max_guesses=self.step_guesses,
            shares=bool(self.shared_groups),
            shares_in_all=self.fixed_order,
        )
