"""What the front end counts."""

import time
from collections.abc import Sequence
from weakref import WeakSet

from quire.errors import InvalidRequest, Overloaded, QuireError, RequestFailed, TemplateFailed
from quire.ipc.messages import Counts
from quire.retry_reservations import MAX_WAIT_S
from quire.server.observe.exposition import Exposition, Histogram
from quire.server.observe.request_record import RequestRecord

DURATIONS_S = tuple(0.00015 * 1.5**k for k in range(35))
INTER_TOKEN_S = tuple(0.0005 * 1.5**k for k in range(24))
COUNTERS = (
    ("tgi_request_count", "Requests that came in.", "num_requests"),
    ("tgi_request_success", "Requests that were answered.", "num_succeeded"),
    ("quire_prompt_tokens", "Tokens of prompts.", "num_prompt_tokens"),
    ("quire_cached_tokens", "Of those, found in the prefix cache.", "num_cached_tokens"),
    ("quire_generated_tokens", "Tokens generated.", "num_generated_tokens"),
)
HISTOGRAMS = (
    ("tgi_request_duration", "Seconds from a request's arrival to its end.", "request_duration"),
    ("tgi_request_validation_duration", "Seconds spent on checking and tokenising.", "validation_duration"),
    ("tgi_request_queue_duration", "Seconds spent waiting for a slot.", "queue_duration"),
    ("tgi_request_inference_duration", "Seconds from the slot to the end.", "inference_duration"),
    ("tgi_request_mean_time_per_token_duration", "Seconds per token of a request.", "mean_time_per_token"),
    ("tgi_request_input_length", "Tokens of prompts.", "input_length"),
    ("tgi_request_max_new_tokens", "Tokens asked for.", "max_new_tokens"),
    ("tgi_request_generated_tokens", "Tokens generated.", "generated_tokens"),
    ("tgi_request_skipped_tokens", "Speculated tokens accepted beside each token.", "skipped_tokens"),
    ("quire_time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    ("quire_inter_token_seconds", "Between the tokens of a request.", "inter_token"),
    ("quire_detokenize_seconds", "To turn the tokens of a step into text.", "detokenizing"),
)  # fmt: skip
_NUMBERS = tuple(attribute for _, _, attribute in COUNTERS)
FAILURES = ("validation", "overloaded", "generation", "incomplete", "dropped", "template")


class Metrics:
    """The counts of one front end. Owned by its event loop."""

    def __init__(self, max_total_tokens: int) -> None:
        lengths = [max_total_tokens * k / 100 for k in range(1, 101)]
        self.time_to_first_token = Histogram(DURATIONS_S)
        self.inter_token = Histogram(INTER_TOKEN_S)
        self.detokenizing = Histogram(DURATIONS_S)
        self.request_duration = Histogram(DURATIONS_S)
        self.validation_duration = Histogram(DURATIONS_S)
        self.queue_duration = Histogram(DURATIONS_S)
        self.inference_duration = Histogram(DURATIONS_S)
        self.mean_time_per_token = Histogram(DURATIONS_S)
        self.input_length = Histogram(lengths)
        self.max_new_tokens = Histogram(lengths)
        self.generated_tokens = Histogram(lengths)
        self.skipped_tokens = Histogram(lengths)
        self.num_requests = 0
        self.num_succeeded = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.failures = dict.fromkeys(FAILURES, 0)
        self._noted: WeakSet[QuireError] = WeakSet()
        self._last_end_s: float | None = None
        self.end_interval_s = 0.0  # between ends of requests, averaged over the last few

    def failed(self, err: str) -> None:
        self.failures[err] = self.failures.get(err, 0) + 1

    def note_error(self, error: QuireError) -> None:
        """Counted once, although a stream and the route that reads it both see it."""
        if error not in self._noted:
            self._noted.add(error)
            self.failed(failure_name(error))

    def note_request(self, record: RequestRecord) -> None:
        """A request is over: answered, failed, or dropped by its client."""
        times, num_tokens = record.times, record.num_generated_tokens
        self._note_end(time.monotonic())
        self.num_generated_tokens += num_tokens
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        if record.error is not None:
            self.note_error(record.error)
            return
        if not record.is_complete:
            self.failed("dropped")
            return
        self.num_succeeded += 1
        self.request_duration.observe(times.total_s)
        self.validation_duration.observe(times.validation_s)
        self.queue_duration.observe(times.queue_s)
        self.inference_duration.observe(times.inference_s)
        self.mean_time_per_token.observe(times.per_token_s(num_tokens))
        self.input_length.observe(record.num_prompt_tokens)
        self.max_new_tokens.observe(record.max_new_tokens)
        self.generated_tokens.observe(num_tokens)
        self.skipped_tokens.observe(0, num_tokens)  # nothing is speculated, so every token is computed

    def _note_end(self, now: float) -> None:
        if self._last_end_s is not None:
            interval_s = min(now - self._last_end_s, MAX_WAIT_S)  # nights say nothing about busy hours
            self.end_interval_s += 0.2 * (interval_s - self.end_interval_s)
        self._last_end_s = now

    def counts(self) -> Counts:
        """Everything counted, as plain data."""
        return Counts(
            {name: getattr(self, name) for name in _NUMBERS},
            {name: (histogram.counts, histogram.sum) for name, histogram in self._histograms()},
            self.failures,
        )

    def write(self, page: Exposition, others: Sequence[Counts] = ()) -> None:
        """The counts of this front end and of others, added up."""
        total = self.counts()
        for name, help, attribute in COUNTERS:
            value = total.numbers[attribute] + sum(one.numbers[attribute] for one in others)
            page.counter(name, help, value)
        failures = {
            err: count + sum(one.failures.get(err, 0) for one in others) for err, count in total.failures.items()
        }
        page.counters("tgi_request_failure", "Requests that were not answered.", "err", failures)
        for name, help, attribute in HISTOGRAMS:
            page.histogram(name, help, self._added(attribute, others))

    def _histograms(self) -> list[tuple[str, Histogram]]:
        return [(attribute, getattr(self, attribute)) for _, _, attribute in HISTOGRAMS]

    def _added(self, attribute: str, others: Sequence[Counts]) -> Histogram:
        own: Histogram = getattr(self, attribute)
        added = Histogram(own.bounds)
        columns = [own.counts, *(one.histograms[attribute][0] for one in others)]
        added.counts = [sum(column) for column in zip(*columns, strict=True)]
        added.sum = own.sum + sum(one.histograms[attribute][1] for one in others)
        return added


def failure_name(error: QuireError) -> str:
    """What text-generation-inference calls this kind of failure."""
    if isinstance(error, InvalidRequest):
        return "template" if isinstance(error, TemplateFailed) else "validation"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "generation" if isinstance(error, RequestFailed) else "incomplete"
