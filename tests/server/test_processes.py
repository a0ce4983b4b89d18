"""The server as it runs: an engine process behind a socket, HTTP workers in front of it."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from quire.server.processes.child import KILLED
from quire.server.processes.serve import print_ready
from tests import web
from tests.server.fake_engine import HANG
from tests.server.processes import WAIT_S, Served, free_port, wait_until

SMALL = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "abc", "max_tokens": 500, "temperature": 0}
PARTS = ("forward", "decode", "filter")  # of a step


@pytest.fixture
def serve(model_folder) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(*settings: str) -> Served:
        made.append(Served(model_folder, *settings))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def test_an_engine_process_answers(served, server):
    """As an engine in the same process would."""
    answer = served.ask(SMALL).json()
    prompt = server.model.tokenizer.encode("abc")
    assert answer["choices"][0]["text"] == server.expected_text(prompt, 8)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert web.post(f"{served.url}/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 4


def test_metrics_show_the_engine(served):
    served.ask(SMALL)
    values: dict[str, str] = {}

    def has_told() -> bool:
        lines = web.get(f"{served.url}/metrics").text.splitlines()
        values.update(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        told = float(values.get('tgi_batch_inference_count{method="decode"}', 0)) >= 7
        # The engine may tell of itself between two of the counts of its last step.
        is_whole = all(of(f"tgi_batch_{name}_duration_count") == of("tgi_batch_inference_success") for name in PARTS)
        return told and is_whole and values["tgi_queue_size"] == values["tgi_batch_current_size"] == "0"

    def of(name: str) -> list[str | None]:
        return [values.get(f'{name}{{method="{method}"}}') for method in ("prefill", "decode")]

    wait_until(has_told)
    assert float(values['tgi_batch_inference_count{method="prefill"}']) >= 1
    assert float(values['tgi_batch_inference_failure{method="decode"}']) == 0
    pages = [int(values[f"quire_pages_{state}"]) for state in ("free", "active", "cached")]
    assert sum(pages) == 3999
    assert values["quire_late_compilations"] == "0"
    assert float(values['quire_step_tokens{method="prefill"}']) >= 3
    assert min(map(float, of("tgi_batch_inference_success"))) >= 1
    for name in PARTS:
        assert min(map(float, of(f"tgi_batch_{name}_duration_sum"))) > 0


def test_sequences_that_join_others_are_timed(serve):
    served = serve("step_s=0.05").wait()
    name = 'tgi_batch_concat_duration_count{method="decode"} 1'
    with web.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}):
        served.wait_for_running(1)
        served.ask(SMALL | {"prompt": "xyz"})
    wait_until(lambda: name in web.get(f"{served.url}/metrics").text)


def test_the_engine_tells_how_long_requests_waited(serve):
    served = serve("step_s=0.05").wait()
    every_slot = LONG | {"n": 16, "temperature": 1, "stream": True}
    answers: list[httpx.Response] = []
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 3}}
    asking = threading.Thread(target=lambda: answers.append(web.post(f"{served.url}/generate", json=body)))
    begun_s = time.monotonic()
    with web.stream("POST", f"{served.url}/v1/completions", json=every_slot):
        served.wait_for_running(16)
        asking.start()
        wait_until(lambda: "\ntgi_queue_size 1\n" in web.get(f"{served.url}/metrics").text)
        waits_since_s = time.monotonic()  # at the latest
        time.sleep(0.1)  # a wait that cannot be taken for none
        waited_ms = (time.monotonic() - waits_since_s) * 1000
    asking.join(WAIT_S)
    (answer,) = answers
    took_ms = (time.monotonic() - begun_s) * 1000
    queue_ms, inference_ms = (int(answer.headers[f"x-{name}-time"]) for name in ("queue", "inference"))
    assert queue_ms >= int(waited_ms)
    assert inference_ms >= 3 * 50 - 1  # so long do three steps take at least
    assert queue_ms + inference_ms <= took_ms
    assert answer.headers["x-compute-type"] == "cpu"


def test_health_generates_when_idle_and_tells_the_age_of_steps(served):
    answers: list[httpx.Response] = []

    def generates() -> bool:
        answers.append(web.get(f"{served.url}/health/generate"))
        return answers[-1].status_code == 200

    wait_until(generates)  # on a busy machine the engine may not be heard of for a moment
    assert answers[-1].json()["took_s"] >= 0


def test_an_engine_that_cannot_be_kept_running_is_told_and_liveness_turns_red(serve):
    served = serve("step_s=0.05", "max_engine_restarts=0").wait()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(served.ask(LONG)))
    asking.start()
    served.wait_for_running(1)
    os.kill(served.engine_pid(), signal.SIGKILL)
    wait_until(lambda: web.get(f"{served.url}/health").status_code == 503)
    asking.join(WAIT_S)
    reason = f"the engine process ended ({KILLED}), 1 times in a row; it is not started again"
    assert (answers[0].status_code, answers[0].json()["error"]["message"]) == (503, reason)
    why = web.get(f"{served.url}/health/generate")
    assert (why.status_code, why.json()["reason"]) == (503, reason)
    assert web.get(f"{served.url}/health/live").status_code == 503  # only a new start would help
    assert served.ask(SMALL).status_code == 503


def test_a_worker_that_is_replaced_when_no_engine_will_come_tells_it_too(serve):
    served = serve("max_engine_restarts=1").wait()
    (worker,), first = served.named("quire-http"), served.engine_pid()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: served.named("quire-engine") not in ([], [first]))
    os.kill(served.engine_pid(), signal.SIGKILL)
    wait_until(lambda: web.get(f"{served.url}/health/live").status_code == 503)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: served.named("quire-http") not in ([], [worker]))
    reason = f"the engine process ended ({KILLED}), 2 times in a row; it is not started again"
    answer = served.ask(SMALL)
    assert (answer.status_code, answer.json()["reason"]) == (503, reason)
    assert web.get(f"{served.url}/health").status_code == 503
    assert web.get(f"{served.url}/health/live").status_code == 503
    served.signal(signal.SIGTERM)
    assert served.ended()[0] == 0


def test_a_worker_that_replaces_another_serves_once_though_its_engine_is_given_up_later(serve):
    served = serve("max_engine_restarts=1").wait()
    (worker,), first = served.named("quire-http"), served.engine_pid()
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: served.named("quire-http") not in ([], [worker]))
    assert served.ask(SMALL).status_code == 200
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: served.named("quire-engine") not in ([], [first]))
    os.kill(served.engine_pid(), signal.SIGKILL)
    wait_until(lambda: web.get(f"{served.url}/health/live").status_code == 503)
    assert served.ask(SMALL).status_code == 503
    served.signal(signal.SIGTERM)
    status, _, log = served.ended()
    assert status == 0
    assert "Traceback" not in log


def wait_for_reason(served: Served, reason: str) -> None:
    """Until readiness is red for this reason; a busy machine may give others before."""

    def is_red() -> bool:
        answer = web.get(f"{served.url}/health")
        return answer.status_code == 503 and reason in answer.json()["reason"]

    wait_until(is_red)


def test_a_stuck_engine_turns_readiness_red(serve):
    served = serve("restart_after_s=0").wait()
    served.ask(SMALL)  # so that it is known how long steps take

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            served.ask({"prompt": [HANG]})

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for_reason(served, "the engine is stuck: 1 sequences run, 0 wait, and no step has ended for")
    assert web.get(f"{served.url}/health/generate").status_code == 503
    assert web.get(f"{served.url}/health/live").status_code == 200  # it may come back
    served.process.kill()
    asking.join(WAIT_S)


def test_a_stopped_engine_process_turns_readiness_red(serve):
    served = serve("restart_after_s=0").wait()
    served.ask(SMALL)
    served.wait_for_running(0)  # the engine has told of itself
    os.kill(served.engine_pid(), signal.SIGSTOP)
    wait_for_reason(served, "the engine has not been heard of for")
    os.kill(served.engine_pid(), signal.SIGCONT)
    wait_until(lambda: web.get(f"{served.url}/health").status_code == 200)


def test_a_signal_drains_and_ends_all_processes(serve):
    served = serve("step_s=0.01").wait()
    children = served.children()
    parts: list[str] = []

    def ask() -> None:
        with web.stream(
            "POST", f"{served.url}/v1/completions", json=LONG | {"max_tokens": 300, "stream": True}
        ) as answer:
            for line in answer.iter_lines():
                parts.extend([line] if line else [])

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: bool(parts))
    served.process.terminate()
    asking.join(WAIT_S)
    assert "Finishing 1 request, up to 90 s; Ctrl-C again quits." in served.log.whole()
    assert parts[-1] == "data: [DONE]"
    assert json.loads(parts[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(WAIT_S) == 0
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid, _ in children))


def test_a_signal_ends_all_processes_while_the_engine_is_being_made(serve):
    served = serve("build_s=3600")
    wait_until(lambda: bool(served.named("quire-engine")))
    engine = served.engine_pid()
    served.process.terminate()
    assert served.process.wait(WAIT_S) == 0
    assert not os.path.exists(f"/proc/{engine}")


def test_while_the_engine_is_being_made_requests_are_told_and_the_port_is_taken(serve, tmp_path):
    port = free_port()
    may_go_on = tmp_path / "may go on"
    serve(f"builds_after={may_go_on}", f"port={port}")
    url = f"http://127.0.0.1:{port}"

    def status(client: httpx.Client, path: str) -> int:
        try:
            return client.get(url + path).status_code
        except httpx.TransportError:
            return 0

    with web.Client() as client:
        wait_until(lambda: status(client, "/health/live") == 200)
        loading = client.post(f"{url}/v1/completions", json=SMALL)
        assert (loading.status_code, loading.json()["reason"]) == (503, "the engine is starting")
        assert int(loading.headers["retry-after"]) > 0
        other = serve(f"port={port}")
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in other.log.whole()
        may_go_on.touch()
        wait_until(lambda: status(client, "/health") == 200)  # with the client that was told 503 before
        assert client.post(f"{url}/v1/completions", json=SMALL).status_code == 200


def test_a_server_that_is_ready_says_where(capsys):
    print_ready("http://host:1")
    assert capsys.readouterr().err.startswith("Ready. Chat: http://host:1  API: http://host:1/v1  (process")


def test_metrics_have_a_port_of_their_own_where_asked(serve):
    port = free_port()
    served = serve(f"prometheus_port={port}").wait()
    assert "tgi_request_count" in web.get(f"http://127.0.0.1:{port}/metrics").text
    assert "tgi_request_count" in web.get(f"{served.url}/metrics").text
    assert web.get(f"http://127.0.0.1:{port}/health").status_code == 404
    assert web.post(f"http://127.0.0.1:{port}/v1/completions", json=SMALL).status_code == 404


def test_draining_is_bounded(serve):
    served = serve("step_s=0.05", "drain_s=0.5").wait()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(served.ask(LONG)))
    asking.start()
    served.wait_for_running(1)
    served.process.terminate()
    asking.join(WAIT_S)
    assert answers[0].status_code == 503  # it was not waited for
    assert served.process.wait(WAIT_S) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a score of Linux")
def test_where_memory_runs_out_the_system_ends_the_engine_before_the_server(serve):
    served = serve().wait()
    engine, server = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (served.engine_pid(), served.process.pid)
    )
    assert engine == min(1000, server + 100)


def test_the_engine_ends_with_the_server_that_started_it(serve):
    served = serve().wait()
    engine = served.engine_pid()
    served.process.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{engine}"))


def test_a_model_that_cannot_be_served_says_why(serve):
    served = serve("refuses=1")
    status, output, errors = served.ended()
    assert (status, output) == (1, "")
    assert "unsupported_model: the model has three heads; two are supported" in errors


def test_a_collector_that_is_none_is_refused_at_the_start(serve):
    served = serve("otlp_endpoint=localhost:4317")
    status, output, errors = served.ended()
    assert (status, output) == (1, "")
    assert "setting: otlp_endpoint is 'localhost:4317'; it must be an address" in errors


def test_several_workers_share_the_port_and_the_engine(serve):
    served = serve("http_workers=3").wait()
    # Each connection may land at another worker; all give the same answers.
    texts = {served.ask(SMALL).json()["choices"][0]["text"] for _ in range(12)}
    assert len(texts) == 1
    assert (len(served.named("quire-engine")), len(served.named("quire-http"))) == (1, 3)

    def counted() -> set[str]:
        """What each of several connections is told, whichever workers they reach."""
        pages = [web.get(f"{served.url}/metrics").text for _ in range(4)]
        return {line for page in pages for line in page.splitlines() if line.startswith("tgi_request_count ")}

    wait_until(lambda: counted() == {"tgi_request_count 12"})
    served.process.terminate()
    assert served.process.wait(WAIT_S) == 0
