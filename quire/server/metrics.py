"""What the front end counts."""

import time
from weakref import WeakSet

from quire.errors import InvalidRequest, Overloaded, QuireError, RequestFailed
from quire.server.exposition import Exposition, Histogram
from quire.server.stream import Stream

DURATIONS_S = tuple(0.00015 * 1.5**k for k in range(35))
INTER_TOKEN_S = tuple(0.0005 * 1.5**k for k in range(24))
FAILURES = ("validation", "overloaded", "generation", "incomplete", "dropped", "template")


class Metrics:
    """The counts of one front end. Owned by its event loop."""

    def __init__(self, max_total_tokens: int) -> None:
        lengths = [max_total_tokens * k / 100 for k in range(1, 101)]
        self.time_to_first_token = Histogram(DURATIONS_S)
        self.inter_token = Histogram(INTER_TOKEN_S)
        self.request_duration = Histogram(DURATIONS_S)
        self.validation_duration = Histogram(DURATIONS_S)
        self.queue_duration = Histogram(DURATIONS_S)
        self.inference_duration = Histogram(DURATIONS_S)
        self.mean_time_per_token = Histogram(DURATIONS_S)
        self.input_length = Histogram(lengths)
        self.max_new_tokens = Histogram(lengths)
        self.generated_tokens = Histogram(lengths)
        self.num_requests = 0
        self.num_succeeded = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.failures = dict.fromkeys(FAILURES, 0)
        self._noted: WeakSet[QuireError] = WeakSet()
        self._last_end_s: float | None = None
        self._end_interval_s = 0.0

    def failed(self, err: str) -> None:
        self.failures[err] = self.failures.get(err, 0) + 1

    def note_error(self, error: QuireError) -> None:
        """Counted once, although a stream and the route that reads it both see it."""
        if error not in self._noted:
            self._noted.add(error)
            self.failed(failure_name(error))

    def note_stream(self, stream: Stream) -> None:
        """A stream was closed: answered, failed, or dropped by its client."""
        now = time.monotonic()
        self._note_end(now)
        num_tokens = stream.num_tokens
        self.num_generated_tokens += num_tokens
        self.num_prompt_tokens += stream.num_prompt_tokens
        self.num_cached_tokens += stream.num_cached_tokens
        if stream.error is not None:
            self.note_error(stream.error)
            return
        if not stream.is_over:
            self.failed("dropped")
            return
        self.num_succeeded += 1
        self.request_duration.observe(now - stream.opened_s)
        self.validation_duration.observe(stream.submitted_s - stream.opened_s)
        self.queue_duration.observe(stream.queue_s)
        inference_s = now - stream.submitted_s - stream.queue_s
        self.inference_duration.observe(inference_s)
        self.mean_time_per_token.observe(inference_s / max(1, num_tokens))
        self.input_length.observe(stream.num_prompt_tokens)
        self.max_new_tokens.observe(sum(prompt.request.max_tokens for prompt in stream.prompts))
        self.generated_tokens.observe(num_tokens)

    def _note_end(self, now: float) -> None:
        """Keep the time between ends, averaged over the last few."""
        if self._last_end_s is not None:
            self._end_interval_s += 0.2 * (now - self._last_end_s - self._end_interval_s)
        self._last_end_s = now

    def retry_after_s(self) -> float:
        """When a place is likely to be free again."""
        return min(max(1.0, self._end_interval_s), 600.0)

    def write(self, page: Exposition) -> None:
        page.counter("tgi_request_count", "Requests that came in.", self.num_requests)
        page.counter("tgi_request_success", "Requests that were answered.", self.num_succeeded)
        page.counters("tgi_request_failure", "Requests that were not.", "err", self.failures)
        for name, help, histogram in (
            ("tgi_request_duration", "Seconds from a request's arrival to its end.", self.request_duration),
            ("tgi_request_validation_duration", "Seconds spent on checking and tokenising.", self.validation_duration),
            ("tgi_request_queue_duration", "Seconds spent waiting for a slot.", self.queue_duration),
            ("tgi_request_inference_duration", "Seconds from the slot to the end.", self.inference_duration),
            ("tgi_request_mean_time_per_token_duration", "Seconds per token of a request.", self.mean_time_per_token),
            ("tgi_request_input_length", "Tokens of prompts.", self.input_length),
            ("tgi_request_max_new_tokens", "Tokens asked for.", self.max_new_tokens),
            ("tgi_request_generated_tokens", "Tokens generated.", self.generated_tokens),
            ("quire_time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("quire_inter_token_seconds", "Between the tokens of a request.", self.inter_token),
        ):
            page.histogram(name, help, histogram)
        page.counter("quire_prompt_tokens", "Tokens of prompts that were answered.", self.num_prompt_tokens)
        page.counter("quire_cached_tokens", "Of those, found in the prefix cache.", self.num_cached_tokens)
        page.counter("quire_generated_tokens", "Tokens generated.", self.num_generated_tokens)


def failure_name(error: QuireError) -> str:
    """What text-generation-inference calls this kind of failure."""
    if isinstance(error, InvalidRequest):
        return "validation"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "generation" if isinstance(error, RequestFailed) else "incomplete"
