"""The service: requests to the engines, and their messages to the streams that wait for them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from quire.errors import EngineFailed, EngineStopped, Overloaded, error_of, invalid
from quire.ipc.messages import (
    Account,
    AdapterDone,
    AdapterTable,
    BegunWith,
    Event,
    Failed,
    Progress,
    PromptBlocks,
    Queued,
    Started,
    Stats,
    StepTrace,
    ToFrontEnd,
)
from quire.ipc.worker_counts import KnownCounts
from quire.request import FinishReason
from quire.retry_reservations import RetryReservations
from quire.seeds import Seeds
from quire.server.caller import key_name
from quire.server.observe.engine_metrics import sum_stats
from quire.server.observe.metrics import Metrics
from quire.server.observe.refusal_log import RefusalLog
from quire.server.offload import Offload
from quire.server.rate_limits import RateLimits
from quire.server.service.adapters import ServedAdapters
from quire.server.service.arrival import Arrival
from quire.server.service.arrival_turns import ArrivalTurns
from quire.server.service.engines import Engines, Port
from quire.server.service.generation_probe import GenerationProbe
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.grammar_check import GrammarCheck
from quire.server.service.ledger import ledger
from quire.server.service.open_prompt import OpenPrompt
from quire.server.service.response_store import ResponseStore
from quire.server.service.served_model import ServedModel
from quire.server.service.span_attributes import attributes_at_end, attributes_at_open
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from quire.server.tenant import tenant

if TYPE_CHECKING:
    from quire.server.observe.tracing import StepSpans, Tracing  # needs packages that most installations do not have

log = logging.getLogger(__name__)

T = TypeVar("T")

RESTART_S = 5.0  # a usual restart of the engine
SHUTTING_DOWN = "the server is shutting down"


class Service:
    """Turns typed requests into streams of text.

    Every stream is in `_streams` until it ends or is closed, and every prompt of it that has not ended is in
    `engines.prompts`. Owned by the event loop.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: ServerSettings,
        limits: RateLimits | None = None,
        seeds: Seeds | None = None,
    ) -> None:
        """`limits` and `seeds` are those of all workers."""
        self.model = model
        self.settings = settings
        self.limits = limits or RateLimits(settings.keys)
        self._seeds = seeds or Seeds(settings.seed)
        keys = [key.name for key in settings.keys]
        self.metrics = Metrics(model.max_total_tokens, model.max_input_tokens, model.max_guesses, keys)
        self.others = KnownCounts()  # of the other workers
        self.publish_counts: Callable[[], None] = lambda: None  # sends this worker's to the others
        self.tracing: Tracing | None = None
        self.refusals = RefusalLog()
        self.offload = Offload()
        self.arrival_turns = ArrivalTurns()
        self.response_store = ResponseStore(settings)
        self.grammar_check = GrammarCheck(self.offload, settings.request_timeout_s)
        self.is_draining = False
        self.is_permanently_down = False  # only a restart of the server brings an engine back
        self.engines = Engines(settings)
        self.adapters = ServedAdapters(model)
        self.probe = GenerationProbe(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.platform = "unknown"
        # An eighth: places kept for retries stay unused in the engine until then.
        self._reservations = RetryReservations(settings.max_concurrent_requests // 8, time.monotonic)
        self._count = 0
        self._streams: set[Stream] = set()
        self._num_sequences = 0  # of the open streams
        self._quiet = asyncio.Event()  # set while no stream is open
        self._quiet.set()

    # The engines

    @property
    def why_not_ready(self) -> str | None:
        return SHUTTING_DOWN if self.is_draining else self.engines.why_not_ready(time.monotonic())

    @property
    def is_engine_busy(self) -> bool:
        """True if an engine has work of any front end; of this one, where the engines do not report."""
        known = [has_work for engine in self.engines if (has_work := engine.health.has_work) is not None]
        return any(known) if known else bool(self._streams)

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the last step ended; None where the engines do not report."""
        now = time.monotonic()
        ages = (engine.health.last_step_age_s(now) for engine in self.engines)
        return min((age_s for age_s in ages if age_s is not None), default=None)

    @property
    def stats(self) -> Stats | None:
        """The latest reports of all engines as one; None before the first."""
        known = [engine.stats for engine in self.engines if engine.stats is not None]
        return sum_stats(known) if known else None

    def connect(self, port: Port, engine: int = 0, cache_tokens: int = 0) -> int:
        """Send requests to `port` from now on. Its messages come to `on_messages` or `deliver`.

        `cache_tokens`: room in the engine's prefix cache. Returns how many requests go on there.
        """
        self._loop = asyncio.get_running_loop()
        self.adapters.greet(port)
        self.probe.forget()
        return self.engines.connect(port, engine, cache_tokens)

    def engine_lost(self, reason: str, engine: int = 0) -> tuple[int, int]:
        """An engine is gone. Returns how many of its requests go on elsewhere at once, and how many wait."""
        self.adapters.engine_lost(self.engines[engine].port, reason)
        self.probe.forget()
        return self.engines.engine_lost(engine, reason)

    def expire(self) -> None:
        """End requests past their deadline, while no engine is there to do it."""
        now = time.monotonic()
        for prompt, stream in self.engines.waiting():
            error = prompt.deadline_passed(now - stream.times.opened_s)
            if error is not None:
                stream.fail(error)

    def disconnect(self, reason: str, engine: int = 0) -> None:
        """An engine is gone for good: requests that wait for it fail, and after the last engine all of them do."""
        self.adapters.engine_lost(self.engines[engine].port, reason)
        failing = self.engines.give_up(engine, reason)
        self.is_permanently_down = all(one.is_gone for one in self.engines)
        for stream in list(self._streams) if self.is_permanently_down else failing:
            stream.fail(EngineFailed(reason))

    def deliver(self, events: list[Event]) -> None:
        """Like `on_messages`, called on another thread."""
        assert self._loop is not None, "connected before it is delivered to"
        self._loop.call_soon_threadsafe(self.on_messages, events)

    def on_messages(self, messages: Sequence[ToFrontEnd], engine: int = 0) -> None:
        """Apply the messages of one step of an engine. Each stream is woken once."""
        now = time.monotonic()
        woken: set[Stream] = set()
        prompts = self.engines.prompts
        has_tokens = False
        steps: list[StepSpans] = []
        for message in messages:
            if isinstance(message, Progress):
                has_tokens = True
                for update in message.updates:
                    found = prompts.get(update.request_id)
                    if found is not None:  # else it was aborted meanwhile
                        prompt, stream = found
                        stream.apply(prompt, update)
                        stream.num_new += len(update.tokens)
                        woken.add(stream)
            elif isinstance(message, Failed):
                failed = self.engines.refused(message)
                found = None if failed is None else prompts.get(message.request_id)
                if failed is not None and found is not None:
                    self.engines.release(message.request_id)
                    found[1].fail(error_of(failed.kind, failed.message, failed.retry_after_s))
            elif isinstance(message, Started):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[0].has_started = True
                    found[1].times.note_queue(message.queue_s)
                    found[1].admit(found[0])
            elif isinstance(message, Queued):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[1].admit(found[0])
            elif isinstance(message, BegunWith):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[0].begun_with = message
            elif isinstance(message, Account):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[0].note(message)
            elif isinstance(message, StepTrace):
                steps += self._begin_spans(message)
            elif isinstance(message, Stats):
                self.engines.on_stats(engine, message, now)
            elif isinstance(message, PromptBlocks):
                self.engines.sent_by_another(engine, message.blocks)
            elif isinstance(message, AdapterTable):
                self.adapters.on_table(message)
            elif isinstance(message, AdapterDone):
                self.adapters.on_done(message)
        if has_tokens:  # by step: by token it would cost as much as it measures
            self.metrics.detokenizing.observe(time.monotonic() - now)
        self._wake(woken, now)
        for step in steps:
            self._traced(lambda tracing, step=step: tracing.end_step(step))  # type: ignore[misc]

    def _wake(self, woken: set[Stream], now: float) -> None:
        """Note the new tokens of streams, and let them be read."""
        observe, metered = self.metrics.inter_token.observe, self.limits.metered
        spent: Counter[str] = Counter()
        for stream in woken:
            num_new = stream.num_new
            if num_new and stream.is_counted:
                gap_s = stream.times.note_tokens(now)
                if gap_s is None:
                    self.metrics.time_to_first_token.observe(now - stream.times.opened_s)
                else:
                    observe(gap_s / num_new, num_new)
                if stream.arrival.key_name in metered:
                    spent[stream.arrival.key_name] += num_new
                stream.num_new = 0
            stream.wake()
        for name, count in spent.items():
            self.limits.charge_tokens(name, count)

    def _begin_spans(self, step: StepTrace) -> "list[StepSpans]":
        """The spans of a step with requests of open streams; none where all are closed."""
        found = (self.engines.prompts.get(request_id) for request_id in step.request_ids)
        streams = dict.fromkeys(stream for _, stream in filter(None, found))
        traces = [stream.trace for stream in streams if stream.trace is not None]
        begun = self._traced(lambda tracing: tracing.begin_step(step, traces)) if traces else None
        return [] if begun is None else [begun]

    def _traced(self, work: "Callable[[Tracing], T]") -> T | None:
        """`work` with the tracing, if there is any. Spans that cannot be written end the tracing, and no request."""
        if self.tracing is None:
            return None
        try:
            return work(self.tracing)
        except Exception:
            log.exception("spans cannot be written; there will be no more of them")
            self.tracing = None
            return None

    # Requests

    def open(
        self,
        specs: Sequence[GenerationSpec],
        arrival: Arrival | None = None,
        *,
        user: str | None = None,
        is_counted: bool = True,
        field: str = "n",
    ) -> Stream:
        """Send prompts to an engine. `user` is for the log; `field` is the one that multiplies sequences.

        Requests of the server itself are not counted: metrics and log leave them out.
        """
        next_id = self.engines.request_id
        if self.is_draining:
            raise EngineStopped(SHUTTING_DOWN)
        if next_id is None or self.is_permanently_down:
            raise EngineFailed(self.why_not_ready or "the engine is gone")
        if not self.settings.wait_for_restart and not self.engines.is_any_connected:
            raise EngineFailed(self.why_not_ready or "the engine is gone", RESTART_S)
        owner = tenant.get()
        num_sequences = self._refuse_if_full(specs, owner, field)
        num_prompt_tokens = sum(len(one.request.prompt) for one in specs)
        if is_counted:
            self.limits.admit_prompt(key_name.get(), num_prompt_tokens)
        arrival = arrival or Arrival({})
        stream = Stream(self, arrival, self.settings.max_buffered_tokens, is_counted)
        stream.user = user
        if is_counted:
            stream.trace = self._traced(
                lambda tracing: tracing.open(arrival.route, arrival.headers, arrival.times.opened_s)
            )
        is_traced = stream.trace is not None and stream.trace.is_wanted
        stream.num_sequences, stream.num_charged = num_sequences, num_prompt_tokens
        self._num_sequences += num_sequences
        self._streams.add(stream)
        self._quiet.clear()
        stream.times.submitted_s = time.monotonic()  # before the engine can count its queue
        min_priority = self.settings.min_priority(arrival.key_name)
        try:
            for one in specs:
                self._count += 1
                request = replace(
                    one.request,
                    request_id=next_id(self._count),
                    seed=self._seeds.draw() if one.draws_seed else one.request.seed,
                    salt=f"{owner}/{one.request.salt}" if owner else one.request.salt,
                    priority=one.request.priority if min_priority is None else max(one.request.priority, min_priority),
                    timeout_s=self.settings.request_timeout_s,
                    queue_timeout_s=self.settings.queue_timeout_s,
                    timings=arrival.wants_timings or is_traced,
                    traced=is_traced,
                )
                self.engines.submit(stream.add(one, request), stream)
        except Exception as defect:
            raise stream.broken_off(defect) from None
        trace = stream.trace
        if trace is not None and is_traced:
            self._traced(lambda tracing: trace.root.set_attributes(attributes_at_open(stream)))
        return stream

    def _refuse_if_full(self, specs: Sequence[GenerationSpec], owner: str | None, field: str) -> int:
        """The number of new sequences. A refused client has a place when it returns after `retry_after_s`."""
        most, num_open = self.settings.max_concurrent_requests, self._num_sequences
        num_asked = sum(one.request.samples for one in specs)
        if num_asked > most:
            raise invalid(
                field,
                f"asks for {num_asked} sequences, of {len(specs)} prompts; the limit is {most}, "
                "--max-concurrent-requests",
            )
        if num_open + num_asked <= most and not self._reservations:
            return num_asked
        client = hash((owner, *((one.request.prompt, one.request.max_tokens) for one in specs)))
        num_kept = self._reservations.num_kept_from(client) if num_open else 0
        if num_open + num_kept + num_asked <= most:
            self._reservations.admitted(client)
            return num_asked
        retry_after_s = self._reservations.refused(client, num_asked, 0.0, self.metrics.end_interval_s)
        kept = f" and {num_kept} places are kept for clients that retry" if num_kept else ""
        raise Overloaded(
            f"{num_open} sequences are open{kept}, and {num_asked} more are asked for; the limit is {most}",
            retry_after_s,
        )

    def ended(self, prompt: OpenPrompt) -> None:
        """All samples of `prompt` are complete. After a stop string the engine would continue."""
        if any(sample.finish is FinishReason.STOP_STRING for sample in prompt.samples):
            self.engines.abort(prompt.request.request_id)
        else:
            self.engines.release(prompt.request.request_id)

    def forget(self, stream: Stream) -> None:
        """`stream` is closed: abort its prompts that still run."""
        for prompt in stream.prompts:
            self.engines.abort(prompt.request.request_id)
        self._streams.discard(stream)
        self._num_sequences -= stream.num_sequences
        if not self._streams:
            self._quiet.set()
        if stream.is_counted:
            record = stream.record
            self.metrics.note_request(record)
            record.log()
            if record.is_defect and not record.num_generated_tokens:  # its client got nothing for them
                self.limits.refund_prompt(record.key_name, stream.num_charged)
            trace = stream.trace
            if trace is not None:
                self._traced(
                    lambda tracing: tracing.note_request(trace, record, ledger(stream), attributes_at_end(stream))
                )

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def drain(self, within_s: float) -> None:
        """Refuse new requests and wait for the open ones; those that are left after `within_s` fail."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._quiet.wait(), within_s)
        except TimeoutError:
            for stream in list(self._streams):
                stream.fail(EngineStopped(f"the server shut down; {within_s:g} s were given to finish"))
