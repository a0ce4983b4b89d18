"""The service: requests to the engine, and its messages to the streams that wait for them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire.errors import DeadlineExceeded, EngineFailed, Overloaded, QuireError, RequestFailed, invalid, time_limit
from quire.ipc.messages import (
    Abort,
    Account,
    Command,
    Counts,
    Event,
    Failed,
    Others,
    Progress,
    Started,
    Stats,
    StepTrace,
    Submit,
    ToFrontEnd,
)
from quire.request import FinishReason
from quire.retry_reservations import RetryReservations
from quire.server.caller import key_name
from quire.server.observe.engine_health import EngineHealth
from quire.server.observe.metrics import Metrics
from quire.server.observe.refusal_log import RefusalLog
from quire.server.offload import Offload
from quire.server.rate_limits import RateLimits
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.grammar_check import GrammarCheck
from quire.server.service.ledger import ledger
from quire.server.service.prompt import Prompt
from quire.server.service.response_store import ResponseStore
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from quire.server.tenant import tenant

if TYPE_CHECKING:
    from quire.server.observe.tracing import StepSpans, Tracing  # needs packages that most installations do without

log = logging.getLogger(__name__)

RESTART_S = 5.0  # a usual restart of the engine


class Port(Protocol):
    """A connection to an engine, in this process or another."""

    def request_id(self, count: int) -> int: ...

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...


class Service:
    """Turns typed requests into streams of text.

    Every stream is in `_streams` until it ends or is closed, and every prompt of it that the engine works on is in
    `_prompts`. Owned by the event loop.
    """

    def __init__(self, model: ServedModel, settings: ServerSettings, limits: RateLimits | None = None) -> None:
        """`limits` are those of all workers."""
        self.model = model
        self.settings = settings
        self.limits = limits or RateLimits(settings.keys)
        self.metrics = Metrics(model.max_total_tokens, [key.name for key in settings.keys])
        self.tracing: Tracing | None = None
        self.refusals = RefusalLog()
        self.offload = Offload()
        self.response_store = ResponseStore(settings)
        self.grammar_check = GrammarCheck(self.offload, settings.request_timeout_s)
        self.is_draining = False
        self.is_permanently_down = False  # only a restart of the server brings the engine back
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: Port | None = None
        self._request_id: Callable[[int], int] | None = None  # by the count of a request
        self._why_not = "the engine is starting"
        self.stats: Stats | None = None  # the latest report of the engine process
        self.others: list[Counts] = []  # of the other front ends
        self.platform = "unknown"
        self._health = EngineHealth(settings.stuck_after_s)
        # An eighth: places kept for retries stay unused in the engine meanwhile.
        self._reservations = RetryReservations(settings.max_concurrent_requests // 8, time.monotonic)
        self._count = 0
        self._prompts: dict[int, tuple[Prompt, Stream]] = {}
        self._streams: set[Stream] = set()
        self._num_sequences = 0  # of the open streams
        self._quiet = asyncio.Event()  # set while no stream is open
        self._quiet.set()

    # The engine

    @property
    def why_not_ready(self) -> str | None:
        if self.is_draining:
            return "the server is shutting down"
        if self._port is None:
            return self._why_not
        return self._health.trouble(time.monotonic())

    @property
    def is_engine_busy(self) -> bool:
        """True if the engine has work of any front end; of this one, where the engine does not report."""
        has_work = self._health.has_work
        return bool(self._streams) if has_work is None else has_work

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the last step ended; None where the engine does not report."""
        return self._health.last_step_age_s(time.monotonic())

    def connect(self, port: Port) -> None:
        """Send requests to `port` from now on. Its messages come to `on_messages` or `deliver`.

        Open requests are sent at once, in the order of their arrival, with the tokens that another engine generated.
        A port that follows another gives the same ids.
        """
        self._loop = asyncio.get_running_loop()
        self._port = port
        self._health.forget()
        self._request_id = port.request_id
        now = time.monotonic()
        for prompt, stream in self._prompts.values():
            port.send(prompt.resumed(now - stream.times.opened_s))

    def lose(self, reason: str) -> None:
        """The engine is gone, or the next one cannot begin yet. The streams wait for it."""
        self._port = None
        self._why_not = reason

    def expire(self) -> None:
        """End requests whose time has passed, while there is no engine that would."""
        now = time.monotonic()
        for prompt, stream in list(self._prompts.values()) if self._port is None else ():
            timeout_s = prompt.request.timeout_s
            if timeout_s is not None and now - stream.times.opened_s > timeout_s:
                stream.fail(DeadlineExceeded(f"{time_limit(timeout_s)} passed before the answer was complete"))

    def disconnect(self, reason: str) -> None:
        """The engine is gone for good: open requests fail, and so do later ones."""
        self._port = None
        self._why_not = reason
        self.is_permanently_down = True
        for stream in list(self._streams):
            stream.fail(EngineFailed(reason))

    def deliver(self, events: list[Event]) -> None:
        """As `on_messages`, from another thread."""
        assert self._loop is not None, "connected before it is delivered to"
        self._loop.call_soon_threadsafe(self.on_messages, events)

    def on_messages(self, messages: Sequence[ToFrontEnd]) -> None:
        """Apply the messages of one step. Each stream is woken once."""
        now = time.monotonic()
        woken: set[Stream] = set()
        prompts = self._prompts
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
                found = prompts.pop(message.request_id, None)
                if found is not None:
                    found[1].fail(error_of(message))
            elif isinstance(message, Started):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[1].times.note_queue(message.queue_s)
            elif isinstance(message, Account):
                found = prompts.get(message.request_id)
                if found is not None:
                    found[0].note(message)
            elif isinstance(message, StepTrace):
                steps += self._begin_spans(message)
            elif isinstance(message, Stats):
                self.stats = message
                self._health.hear(message, now)
            elif isinstance(message, Others):
                self.others = message.counts
        if has_tokens:  # by step: by token it would cost as much as it measures
            self.metrics.detokenizing.observe(time.monotonic() - now)
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
        for step in steps:
            assert self.tracing is not None
            self.tracing.end_step(step)

    def _begin_spans(self, step: StepTrace) -> "list[StepSpans]":
        """The spans of a step with requests of open streams; none where all are closed."""
        found = (self._prompts.get(request_id) for request_id in step.request_ids)
        streams = dict.fromkeys(stream for _, stream in filter(None, found))
        traces = [stream.trace for stream in streams if stream.trace is not None]
        return [self.tracing.begin_step(step, traces)] if self.tracing is not None and traces else []

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
        """Send prompts to the engine. `user` is for the log; `field` is the one that multiplies sequences.

        Requests of the server itself are not counted: metrics and log leave them out.
        """
        if self._request_id is None or self.is_draining or self.is_permanently_down:
            raise EngineFailed(self.why_not_ready or "the engine is gone")
        if self._port is None and not self.settings.wait_for_restart:
            raise EngineFailed(self._why_not, RESTART_S)
        owner = tenant.get()
        num_sequences = self._refuse_if_full(specs, owner, field)
        if is_counted:
            self.limits.admit_prompt(key_name.get(), sum(len(one.request.prompt) for one in specs))
        arrival = arrival or Arrival({})
        stream = Stream(self, arrival, self.settings.max_buffered_tokens, is_counted)
        stream.user = user
        if self.tracing is not None and is_counted:
            stream.trace = self.tracing.open(arrival.route, arrival.headers, arrival.times.opened_s)
        is_traced = stream.trace is not None and stream.trace.is_wanted
        stream.num_sequences = num_sequences
        self._num_sequences += num_sequences
        self._streams.add(stream)
        self._quiet.clear()
        stream.times.submitted_s = time.monotonic()  # before the engine can count its queue
        for one in specs:
            self._count += 1
            request = replace(
                one.request,
                request_id=self._request_id(self._count),
                salt=f"{owner}/{one.request.salt}" if owner else one.request.salt,
                timeout_s=self.settings.request_timeout_s,
                queue_timeout_s=self.settings.queue_timeout_s,
                timings=arrival.wants_timings or is_traced,
                traced=is_traced,
            )
            self._prompts[request.request_id] = (stream.add(one, request), stream)
            if self._port is not None:
                self._port.send(Submit(request, waited_s=stream.times.total_s))
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
        kept = f" and {num_kept} places are kept for clients that were told to retry" if num_kept else ""
        raise Overloaded(
            f"{num_open} sequences are open{kept}, and {num_asked} more are asked for; the limit is {most}",
            retry_after_s,
        )

    def ended(self, prompt: Prompt) -> None:
        """All samples of `prompt` are complete. After a stop string the engine would continue."""
        self._prompts.pop(prompt.request.request_id, None)
        if self._port is not None and any(sample.finish is FinishReason.STOP_STRING for sample in prompt.samples):
            self._port.send(Abort(prompt.request.request_id))

    def forget(self, stream: Stream) -> None:
        """`stream` is closed: abort its prompts that still run."""
        for prompt in stream.prompts:
            request_id = prompt.request.request_id
            if self._prompts.pop(request_id, None) is not None and self._port is not None:
                self._port.send(Abort(request_id))
        self._streams.discard(stream)
        self._num_sequences -= stream.num_sequences
        if stream.is_counted:
            record = stream.record
            self.metrics.note_request(record)
            record.log()
            if self.tracing is not None and stream.trace is not None:
                self.tracing.note_request(stream.trace, record, ledger(stream))
        if not self._streams:
            self._quiet.set()

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
                stream.fail(EngineFailed(f"the server shut down; {within_s:g} s were given to finish"))


def error_of(failed: Failed) -> QuireError:
    """The error that a message reports, with its type."""
    error_type = _ERROR_TYPES.get(failed.kind, RequestFailed)
    return error_type(failed.message, failed.retry_after_s)


def _with_subtypes(error_type: type[QuireError]) -> list[type[QuireError]]:
    return [error_type, *(found for sub in error_type.__subclasses__() for found in _with_subtypes(sub))]


_ERROR_TYPES = {error_type.kind: error_type for error_type in _with_subtypes(QuireError)}
