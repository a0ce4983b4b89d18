"""Requests as OpenTelemetry spans. Loaded only where spans are wanted, and written once a request is over.

generate | generate_stream | completions | chat_completions      the request, below the caller's span if it names one
├── schedule           checking, tokenising, handing it to the engine
├── waiting            in the queue
├── infer              with a slot
│   ├── prefill        until the first token
│   └── decode         from there to the last
└── send_generation    until the last of it was written, or send_error
"""

import time
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from quire.errors import InvalidSetting, QuireError
from quire.server.arrival import Arrival
from quire.server.ledger import ledger
from quire.server.stream import Stream

try:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise InvalidSetting(
        f"otlp_endpoint is set; it needs more packages: pip install 'quire[otel]' ({error})"
    ) from error

HTTP_PORT = 4318  # the other one that collectors have, 4317, speaks gRPC


class Tracing:
    """Writes the spans of requests. Owned by the event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._noted: WeakSet[QuireError] = WeakSet()

    def note_stream(self, stream: Stream) -> None:
        """`stream` is over, however it went."""
        now = time.monotonic()
        spans = _Spans(self._tracer)
        root = spans.open(stream.arrival.route, stream.opened_s, self._caller(stream.arrival), kind=SpanKind.SERVER)
        root.set_attributes(_attributes(stream))
        context = set_span_in_context(root)
        spans.write("schedule", stream.opened_s, stream.submitted_s, context)
        started_s = min(now, stream.submitted_s + stream.queue_s)
        spans.write("waiting", stream.submitted_s, started_s, context)
        if stream.first_s is not None:
            inferring = spans.open("infer", started_s, context)
            inner = set_span_in_context(inferring)
            spans.write("prefill", started_s, stream.first_s, inner)
            spans.write("decode", stream.first_s, stream.last_s, inner)
            spans.close(inferring, stream.last_s)
        since_s = started_s if stream.first_s is None else stream.last_s
        if stream.error is not None:
            self._noted.add(stream.error)
            _fail(root, stream.error)
            spans.write("send_error", since_s, now, context)
        elif stream.is_over:
            spans.write("send_generation", since_s, now, context)
        else:
            root.set_attribute("quire.dropped", True)
        spans.close(root, now)

    def note_refusal(self, arrival: Arrival, error: QuireError) -> None:
        """A request that did not get as far as a stream."""
        if error in self._noted:
            return
        now = time.monotonic()
        spans = _Spans(self._tracer)
        root = spans.open(arrival.route, arrival.opened_s, self._caller(arrival), kind=SpanKind.SERVER)
        _fail(root, error)
        spans.write("send_error", now, now, set_span_in_context(root))
        spans.close(root, now)

    def close(self) -> None:
        """Send what is left; takes seconds where nobody listens."""
        self._provider.shutdown()

    def _caller(self, arrival: Arrival) -> Context:
        """The span that the request says it belongs to, as W3C's traceparent has it."""
        carried = {name: arrival.headers.get(name, "") for name in ("traceparent", "tracestate")}
        return self._propagator.extract(carried, context=Context())


class _Spans:
    """Writes spans of the past: the process's monotonic clock becomes the time of day."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._zero_ns = time.time_ns() - time.monotonic_ns()

    def open(self, name: str, begun_s: float, context: Context, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        span: Span = self._tracer.start_span(name, context, kind, start_time=self._ns(begun_s))
        return span

    def close(self, span: Span, ended_s: float) -> None:
        span.end(self._ns(ended_s))

    def write(self, name: str, begun_s: float, ended_s: float, context: Context) -> None:
        self.close(self.open(name, begun_s, context), max(begun_s, ended_s))

    def _ns(self, seconds: float) -> int:
        return self._zero_ns + round(seconds * 1e9)


def _attributes(stream: Stream) -> dict[str, Any]:
    """The ledger, flat. Nothing of what was said."""
    found: dict[str, Any] = {}
    for name, value in ledger(stream).items():
        if isinstance(value, dict):
            found |= {f"quire.{name}.{key}": inner for key, inner in value.items()}
        elif value is not None:
            found[f"quire.{name}"] = value
    return found


def _fail(span: Span, error: QuireError) -> None:
    span.set_attribute("error.type", error.kind)
    span.set_status(StatusCode.ERROR)


def tracing_to(endpoint: str, service_name: str) -> Tracing:
    """Spans go to a collector: by HTTP where the address says so, else by gRPC."""
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
