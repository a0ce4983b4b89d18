"""The sampling parameters of the sequences in slots, as far as launches depend on them."""

from collections.abc import Sequence

from quire.core.plan import Chunk, SlotStart, StepPlan
from quire.executor.launch import Launch
from quire.executor.pending import Wanted
from quire.executor.sampler import NOTHING_ASKED, Features, asked_by


class StartedSlots:
    """The start of the last sequence in each slot. Owned by the executor."""

    def __init__(self, num_slots: int) -> None:
        self._starts: list[SlotStart | None] = [None] * num_slots
        self._special: set[int] = set()  # slots with requests that need more than plain temperature sampling

    def begin(self, start: SlotStart) -> None:
        self._starts[start.slot] = start
        asks = any(asked_by(start)) or start.prompt_logprobs is not None
        (self._special.add if asks else self._special.discard)(start.slot)

    def wanted(self, chunks: Sequence[Chunk]) -> dict[int, Wanted]:
        """The log-probabilities of chunks, by their index: of those that need more than plain sampling."""
        special = self._special
        return {index: self._wanted(chunk) for index, chunk in enumerate(chunks) if chunk.slot in special}

    def features(self, plan: StepPlan, launch: Launch) -> Features:
        """The features that any row asks for."""
        chunks, special = plan.chunks, self._special
        indices = [index for index in launch.indices if chunks[index].slot in special]
        asked = [asked_by(self._start_of(chunks[index])) for index in indices]
        masks = any(index in plan.guided for index in launch.indices) if plan.guided else False
        return Features(*(any(flags) for flags in zip(NOTHING_ASKED, *asked, strict=True)))._replace(masks=masks)

    def _wanted(self, chunk: Chunk) -> Wanted:
        start = self._start_of(chunk)
        scores = start.prompt_logprobs is not None and chunk.start < len(start.prompt) - 1
        return Wanted(start.sampling.logprobs, start.prompt_logprobs if scores else None, len(start.prompt))

    def _start_of(self, chunk: Chunk) -> SlotStart:
        start = self._starts[chunk.slot]
        assert start is not None, f"slot {chunk.slot} was never started"
        return start
