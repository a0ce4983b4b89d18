"""Spans of requests."""

import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind

from quire.core.plan import StepPlan
from quire.errors import InvalidSetting
from quire.server.observe.tracing import Tracing, tracing_to
from tests import web
from tests.fake_executor import NAN
from tests.server.gate import Gate
from tests.server.test_service import send_raw
from tests.server.vocabulary import PIECES

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "secretword"}], "max_tokens": 5}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


def traced_server(server, exporter: InMemorySpanExporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.service.tracing = Tracing(provider)
    return server


@pytest.fixture
def traced(make_server, exporter):
    return traced_server(make_server(), exporter)


def finished_requests(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]


def spans_of(server, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Those of the one request there was."""
    server.wait_until(lambda: bool(finished_requests(exporter)))
    (root,) = finished_requests(exporter)
    spans = [span for span in exporter.get_finished_spans() if span.context.trace_id == root.context.trace_id]
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def batches_of(exporter: InMemorySpanExporter) -> list[tuple[ReadableSpan, dict[str, ReadableSpan]]]:
    """The spans of steps, each with its parts."""
    spans = exporter.get_finished_spans()

    def parts(batch: ReadableSpan) -> dict[str, ReadableSpan]:
        return {one.name: one for one in spans if one.parent and one.parent.span_id == batch.context.span_id}

    return [(span, parts(span)) for span in spans if span.name == "batch"]


def ids_of(links: Iterable[Link]) -> set[int]:
    return {link.context.span_id for link in links}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", CHAT, "chat_completions"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "chat_completions"),
        ("/v1/completions", {"prompt": "secretword", "max_tokens": 5}, "completions"),
        ("/generate", {"inputs": "secretword", "parameters": {"max_new_tokens": 5}}, "generate"),
        ("/generate_stream", {"inputs": "secretword", "parameters": {"max_new_tokens": 5}}, "generate_stream"),
    ],
)
def test_a_request_is_a_span_of_its_caller_with_its_parts_in_order(traced, exporter, path, body, name):
    web.post(traced.url + path, json=body, headers={"traceparent": CALLER})
    spans = spans_of(traced, exporter)
    assert set(spans) == {name, "schedule", "queued", "infer", "prefill", "decode", "send_generation"}
    root = spans[name]
    assert format(root.context.trace_id, "032x") == CALLER.split("-")[1]
    assert format(root.parent.span_id, "016x") == CALLER.split("-")[2]
    for child in ("schedule", "queued", "infer", "send_generation"):
        assert spans[child].parent.span_id == root.context.span_id
    for child in ("prefill", "decode"):
        assert spans[child].parent.span_id == spans["infer"].context.span_id
    order = [spans[part] for part in ("schedule", "queued", "prefill", "decode", "send_generation")]
    assert order[0].start_time == root.start_time
    assert all(before.end_time == after.start_time for before, after in pairwise(order))
    assert order[-1].end_time == root.end_time
    assert root.attributes["quire.generated_tokens"] == 5
    assert root.attributes["quire.prefill_chunks"] == 1
    assert "secretword" not in str([span.to_json() for span in spans.values()])
    assert root.status.is_ok


def test_a_request_without_a_caller_begins_a_trace(traced, exporter):
    web.post(f"{traced.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"traceparent": "x"})
    assert spans_of(traced, exporter)["completions"].parent is None


@pytest.mark.parametrize(
    ("body", "kind", "names"),
    [
        ({"prompt": "abc", "top_p": 7}, "validation", {"completions", "schedule", "send_error"}),
        ({"prompt": [1, NAN, 2], "max_tokens": 3}, "generation", {"completions", "schedule", "queued", "send_error"}),
    ],
)
def test_a_request_that_fails_is_one_span_with_the_kind_of_its_error(traced, exporter, body, kind, names):
    assert web.post(f"{traced.url}/v1/completions", json=body).status_code >= 400
    spans = spans_of(traced, exporter)
    assert set(spans) == names
    assert not spans["completions"].status.is_ok
    assert spans["completions"].attributes["error.type"] == kind


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", CHAT, "chat"),
        ("/v1/completions", {"prompt": "secretword", "max_tokens": 5}, "text_completion"),
        ("/v1/completions", {"prompt": "secretword", "max_tokens": 5, "stream": True}, "text_completion"),
        ("/generate", {"inputs": "secretword", "parameters": {"max_new_tokens": 5}}, "text_completion"),
    ],
)
def test_a_span_says_what_ran_as_opentelemetry_names_it(traced, exporter, path, body, operation):
    answer = web.post(traced.url + path, json=body, headers={"x-request-id": "req-7"})
    (found,) = [span for name, span in spans_of(traced, exporter).items() if span.kind is SpanKind.SERVER]
    assert answer.headers["x-request-id"] == found.attributes["quire.request_id"] == "req-7"
    assert found.attributes["gen_ai.operation.name"] == operation
    assert found.attributes["gen_ai.provider.name"] == "quire"
    assert found.attributes["gen_ai.request.model"] == found.attributes["gen_ai.response.model"] == "fake"
    assert found.attributes["gen_ai.request.max_tokens"] == 5
    assert found.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert found.attributes["gen_ai.usage.input_tokens"] == found.attributes["quire.prompt_tokens"] > 0
    assert found.attributes["gen_ai.usage.output_tokens"] == 5
    assert found.attributes["http.response.status_code"] == 200
    assert found.attributes["quire.outcome"] == "answered"


def test_a_sampled_request_has_its_seed_and_a_greedy_one_has_none(traced, exporter):
    for changes in ({"seed": 3, "temperature": 0.5, "top_p": 0.25}, {"seed": 3, "temperature": 0}):
        web.post(f"{traced.url}/v1/completions", json={"prompt": "a", "max_tokens": 1} | changes)
    traced.wait_until(lambda: len(finished_requests(exporter)) == 2)
    sampled, greedy = finished_requests(exporter)
    assert [sampled.attributes[f"gen_ai.request.{name}"] for name in ("seed", "temperature", "top_p")] == [3, 0.5, 0.25]
    assert "gen_ai.request.seed" not in greedy.attributes


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "abc", "top_p": 7}, 400),
        ("/generate", {"inputs": "abc", "parameters": {"top_p": 7}}, 422),
        ("/v1/completions", {"prompt": [1, NAN, 2], "max_tokens": 3}, 500),
        ("/generate", {"inputs": f"a{PIECES[NAN]}b", "parameters": {"max_new_tokens": 3}}, 424),
    ],
)
def test_the_span_of_a_request_that_fails_has_the_status_and_the_id_of_its_answer(traced, exporter, path, body, status):
    answer = web.post(traced.url + path, json=body)
    assert answer.status_code == status
    traced.wait_until(lambda: bool(finished_requests(exporter)))
    (found,) = finished_requests(exporter)
    assert found.attributes["http.response.status_code"] == status
    assert found.attributes["quire.request_id"] == answer.headers["x-request-id"]


def test_the_span_of_a_client_that_left_says_so(make_server, exporter):
    gate = Gate()
    server = traced_server(make_server(before_result=gate), exporter)
    connection = send_raw(server, "/v1/completions", {"prompt": "abc", "max_tokens": 50})
    server.wait_until(lambda: server.service.num_streams == 1)
    connection.close()
    server.wait_until(lambda: bool(finished_requests(exporter)))
    gate.open()
    (found,) = finished_requests(exporter)
    assert (found.attributes["http.response.status_code"], found.attributes["quire.outcome"]) == (499, "dropped")


def test_a_refused_request_has_the_time_in_which_it_was_checked(traced, exporter):
    web.post(f"{traced.url}/v1/completions", json={"prompt": "abc", "top_p": 7})
    spans = spans_of(traced, exporter)
    root, schedule = spans["completions"], spans["schedule"]
    assert root.start_time == schedule.start_time < schedule.end_time == root.end_time
    assert schedule.parent.span_id == root.context.span_id


def test_steps_are_spans_of_their_own_linked_with_their_requests(traced, exporter):
    web.post(f"{traced.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    root = spans_of(traced, exporter)["completions"]
    batches = batches_of(exporter)
    assert batches
    assert ids_of(root.links) == {batch.context.span_id for batch, _ in batches}
    for batch, parts in batches:
        assert batch.parent is None
        assert batch.context.trace_id != root.context.trace_id
        assert ids_of(batch.links) == {root.context.span_id}
        assert batch.attributes["batch_size"] == 1
        method = batch.attributes["quire.method"]
        assert set(parts) == {method, "filter_batch", "filter_send_generations"}
        order = [parts[name] for name in (method, "filter_batch", "filter_send_generations")]
        assert batch.start_time == order[0].start_time
        assert all(before.end_time == after.start_time for before, after in pairwise(order))
        assert order[-1].end_time == batch.end_time
        assert batch.status.is_ok
    assert batches[0][0].attributes["quire.method"] == "prefill"


def test_a_step_that_tells_errors_has_a_part_for_them(traced, exporter):
    web.post(f"{traced.url}/v1/completions", json={"prompt": [1, NAN, 2], "max_tokens": 3})
    root = spans_of(traced, exporter)["completions"]
    traced.wait_until(lambda: any("send_errors" in parts for _, parts in batches_of(exporter)))
    ((batch, parts),) = batches_of(exporter)
    assert ids_of(root.links) == {batch.context.span_id}
    assert parts["send_errors"].attributes["quire.errors"] == 1


def test_a_step_that_fails_is_a_span_with_an_error(make_server, exporter):
    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if plan.step == 3:
            raise RuntimeError("a device fault")

    server = traced_server(make_server(before_result=fault), exporter)
    assert web.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5}).status_code == 200
    root = spans_of(server, exporter)["completions"]
    ((batch, parts),) = [one for one in batches_of(exporter) if not one[0].status.is_ok]
    assert set(parts) == {"decode"}
    assert batch.context.span_id in ids_of(root.links)


def test_a_request_that_its_caller_does_not_want_traced_leaves_no_span(traced, exporter):
    headers = {"traceparent": CALLER.removesuffix("01") + "00"}
    web.post(f"{traced.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5}, headers=headers)
    traced.wait_until(lambda: traced.service.num_streams == 0)
    assert not exporter.get_finished_spans()


def test_without_it_nothing_of_it_is_loaded():
    code = "import sys, quire.server.processes.front_end, quire.server.processes.serve\n"
    code += "print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Collector(BaseHTTPRequestHandler):
    bodies: list[tuple[str, bytes]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        Collector.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def names_in(*messages: bytes) -> set[str]:
    """Of spans in one message, or in several where they took a while to come."""
    found = [one for message in messages for one in ExportTraceServiceRequest.FromString(message).resource_spans]
    for one in found:
        assert {each.key: each.value.string_value for each in one.resource.attributes}["service.name"] == "tested"
    return {span.name for one in found for scope in one.scope_spans for span in scope.spans}


def test_a_collector_gets_them_by_http_where_its_address_says_so(make_server):
    Collector.bodies = []
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        server = make_server()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server.service.tracing = tracing_to(url, "tested")
        web.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        server.wait_until(lambda: server.service.num_streams == 0)
        server.service.tracing.close()
        collector.shutdown()
        serving.join()
    assert {path for path, _ in Collector.bodies} == {"/v1/traces"}
    assert {"completions", "prefill", "decode"} <= names_in(*(body for _, body in Collector.bodies))


def test_a_collector_gets_them_by_grpc_elsewhere(make_server):
    grpc = pytest.importorskip("grpc")
    received: list[bytes] = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, call):
            def answer(request: bytes, context: object) -> bytes:
                received.append(request)
                return b""

            assert call.method == "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            return grpc.unary_unary_rpc_method_handler(answer)

    collector = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    server = make_server()
    server.service.tracing = tracing_to(f"http://127.0.0.1:{port}", "tested")
    web.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    server.wait_until(lambda: server.service.num_streams == 0)
    server.service.tracing.close()
    collector.stop(0)
    assert {"completions", "prefill", "decode"} <= names_in(*received)


def test_an_address_that_is_none_is_refused():
    for endpoint in ("localhost:4317", "ftp://x", "http://"):
        with pytest.raises(InvalidSetting, match="otlp_endpoint is"):
            tracing_to(endpoint, "tested")
