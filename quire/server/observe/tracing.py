"""Requests and steps as OpenTelemetry spans. Imported only with --otlp-endpoint.

generate | generate_stream | completions | chat_completions      the request, below the caller's span if it names one
├── schedule           checking, tokenising, handing it to the engine
├── queued             in the queue
├── infer              with a slot
│   ├── prefill        until the first token
│   └── decode         from there to the last
└── send_generation    until the last of it was written, or send_error

batch                          a step of the engine, linked with the requests in it, and they with it
├── prefill | decode           from its plan to its result
├── filter_batch               taking in the result; sequences that are complete leave the batch
├── filter_send_generations    until the tokens have reached the streams of the front end
└── send_errors                until the requests that it failed have their errors
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

from quire.errors import InvalidSetting, QuireError
from quire.ipc.messages import StepTrace
from quire.server.caller import request_id
from quire.server.observe.request_record import RequestRecord

try:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise InvalidSetting(
        f"otlp_endpoint is set; it needs more packages: pip install 'quire[otel]' ({error})"
    ) from error

HTTP_PORT = 4318  # the collectors' other port, 4317, speaks gRPC


class RequestTrace(NamedTuple):
    """The span of a request that is not over yet."""

    spans: "_Spans"
    root: Span

    @property
    def is_wanted(self) -> bool:
        """False where the caller or the sampler decided against it."""
        return self.root.is_recording()


class StepSpans(NamedTuple):
    """The span of a step, while its tokens are handed out."""

    spans: "_Spans"
    batch: Span
    step: StepTrace


class Tracing:
    """Writes the spans of requests and steps. Owned by the event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._noted: WeakSet[QuireError] = WeakSet()

    def open(self, route: str, headers: Mapping[str, str], opened_s: float) -> RequestTrace:
        """A request arrived."""
        spans = _Spans(self._tracer)
        root = spans.open(route, opened_s, self._caller(headers), kind=SpanKind.SERVER)
        return RequestTrace(spans, root)

    def begin_step(self, step: StepTrace, traces: Iterable[RequestTrace]) -> StepSpans:
        """Called before the events of a step are handled. The step is linked with the `traces` of its requests."""
        spans, roots = _Spans(self._tracer), [trace.root for trace in traces]
        links = [Link(root.get_span_context()) for root in roots]
        batch = spans.open("batch", step.begun_s, Context(), links=links)
        batch.set_attributes(
            {
                "batch_size": step.num_sequences,
                "quire.step": step.step,
                "quire.method": step.method,
                "quire.tokens": step.num_tokens,
            }
        )
        for root in roots:
            root.add_link(batch.get_span_context())
        return StepSpans(spans, batch, step)

    def end_step(self, begun: StepSpans) -> None:
        """Called after the events of the step were handled."""
        spans, batch, step = begun
        now = max(time.monotonic(), step.completed_s)
        context = set_span_in_context(batch)
        spans.write(step.method, step.begun_s, step.collected_s, context)
        if step.worked:
            spans.write("filter_batch", step.collected_s, step.completed_s, context)
            spans.write("filter_send_generations", step.completed_s, now, context)
        else:
            batch.set_status(StatusCode.ERROR)
        if step.failed_ids:
            telling = spans.open("send_errors", step.completed_s, context)
            telling.set_attribute("quire.errors", len(step.failed_ids))
            spans.close(telling, now)
        spans.close(batch, now)

    def note_request(
        self,
        trace: RequestTrace,
        record: RequestRecord,
        timings: Mapping[str, Any],
        attributes: Mapping[str, Any],
    ) -> None:
        """A request is over. `timings` become attributes of its span, beside the `attributes`."""
        times = record.times
        spans, root, now = trace.spans, trace.root, times.opened_s + times.total_s
        root.set_attributes(_flat(timings) | dict(attributes))
        context = set_span_in_context(root)
        spans.write("schedule", times.opened_s, times.submitted_s, context)
        spans.write("queued", times.submitted_s, times.started_s, context)
        since_s = times.started_s
        if times.first_s is not None:
            inferring = spans.open("infer", times.started_s, context)
            inner = set_span_in_context(inferring)
            spans.write("prefill", times.started_s, times.first_s, inner)
            spans.write("decode", times.first_s, times.last_s, inner)
            spans.close(inferring, times.last_s)
            since_s = times.last_s
        if record.error is not None:
            self._noted.add(record.error)
            _fail(root, record.error)
            spans.write("send_error", since_s, now, context)
        elif record.is_complete:
            spans.write("send_generation", since_s, now, context)
        else:
            root.set_attribute("quire.dropped", True)
        spans.close(root, now)

    def note_refusal(
        self, route: str, headers: Mapping[str, str], opened_s: float, error: QuireError, status: int
    ) -> None:
        """A request was refused before it had a stream. `status`: of its answer."""
        if error in self._noted:
            return
        now = time.monotonic()
        trace = self.open(route, headers, opened_s)
        spans, root = trace.spans, trace.root
        _fail(root, error)
        root.set_attributes({"http.response.status_code": status, "quire.request_id": request_id.get()})
        context = set_span_in_context(root)
        spans.write("schedule", opened_s, now, context)
        spans.write("send_error", now, now, context)
        spans.close(root, now)

    def close(self) -> None:
        """Send the remaining spans; takes seconds where no collector listens."""
        self._provider.shutdown()

    def _caller(self, headers: Mapping[str, str]) -> Context:
        """The caller's span, by W3C's traceparent header."""
        carried = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
        return self._propagator.extract(carried, context=Context())


class _Spans:
    """Writes spans of the past. Times on the monotonic clock become times of day."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._zero_ns = time.time_ns() - time.monotonic_ns()

    def open(
        self,
        name: str,
        begun_s: float,
        context: Context,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> Span:
        span: Span = self._tracer.start_span(name, context, kind, links=links, start_time=self._ns(begun_s))
        return span

    def close(self, span: Span, ended_s: float) -> None:
        span.end(self._ns(ended_s))

    def write(self, name: str, begun_s: float, ended_s: float, context: Context) -> None:
        self.close(self.open(name, begun_s, context), max(begun_s, ended_s))

    def _ns(self, seconds: float) -> int:
        return self._zero_ns + round(seconds * 1e9)


def _flat(timings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in timings.items():
        if isinstance(value, dict):
            found |= {f"quire.{name}.{key}": inner for key, inner in value.items()}
        elif value is not None:
            found[f"quire.{name}"] = value
    return found


def _fail(span: Span, error: QuireError) -> None:
    span.set_attribute("error.type", error.kind)
    span.set_status(StatusCode.ERROR)


def tracing_to(endpoint: str, service_name: str) -> Tracing:
    """Send spans to a collector: by HTTP where its port or path says so, else by gRPC."""
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    return Tracing(provider)


def _exporter(endpoint: str) -> SpanExporter:
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise InvalidSetting(f"otlp_endpoint is {endpoint!r}; it must be an address such as http://localhost:4317")
    try:
        if address.port == HTTP_PORT or address.path.strip("/"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            path = "" if address.path.strip("/") else "/v1/traces"
            return HttpExporter(endpoint=endpoint.rstrip("/") + path)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
    except ImportError as error:
        raise InvalidSetting(f"otlp_endpoint needs more packages: pip install 'quire[otel]' ({error})") from error
    return GrpcExporter(endpoint=endpoint, insecure=address.scheme == "http")
