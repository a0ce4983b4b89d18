"""Compares reading pages with computing them."""

from collections.abc import Callable

from quire.engine.observer import Observer, Step

LAST_SHARE = 0.25  # of the newest measurement in a mean
KEPT_SHARE = 0.9  # of the steps before, when one is added to them
TRY_AGAIN_S = 600.0  # after which a rate of reading counts as unknown


class ReadPace(Observer):
    """Tells whether the pages of a prompt are read sooner than they would be computed.

    While one of the two rates is unknown they are taken to be. Steps are noted by the engine thread, reads by one
    thread that reads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_s = self._step_tokens = 0.0  # of the last steps with prompts
        self._page_s: float | None = None  # to read a page
        self._read_at_s = 0.0

    def step_ended(self, step: Step) -> None:
        is_prefill = step.num_prefill_tokens > step.num_tokens // 2
        if step.error is None and not step.waited_for_compiler and is_prefill:
            self._step_s = KEPT_SHARE * self._step_s + step.took_s
            self._step_tokens = KEPT_SHARE * self._step_tokens + step.num_tokens

    def note_read(self, num_pages: int, took_s: float) -> None:
        page_s, before = took_s / num_pages, self._page_s
        self._page_s = page_s if before is None else before + LAST_SHARE * (page_s - before)
        self._read_at_s = self._clock()

    def is_slower(self, num_pages: int, num_tokens: int) -> bool:
        """Reading so many pages takes longer than computing the tokens that they have."""
        if self._page_s is None or not self._step_tokens or self._clock() - self._read_at_s > TRY_AGAIN_S:
            return False
        return num_pages * self._page_s > num_tokens * self._step_s / self._step_tokens
