"""The engine process ends in every way there is, and nobody's answer does."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import web
from tests.chaos.asking import Asking, body
from tests.chaos.conftest import LONG
from tests.chaos.faulty import Mark
from tests.chaos.server import Server, is_there, wait_until


def serve_with_gate(serve: Callable[..., Server], gate: Path, settings: dict[str, Any], step_s: float = 0.0) -> Server:
    """Without the file `gate` no engine starts again, however long a test takes to look."""
    gate.touch()
    return serve(engine={"step_s": step_s, "builds_after": str(gate)}, settings=settings)


def test_thirty_two_streams_go_on_however_the_engine_is_killed(serve, tmp_path):
    gate = tmp_path / "gate"
    server = serve_with_gate(serve, gate, {"http_workers": 2}, step_s=0.01)
    bodies = [body(n, max_tokens=300) for n in range(28)] + [body(n, n=3, temperature=1) for n in range(2)]
    bodies += [body(30, stop="a"), body(31, stop="b", n=2, temperature=1)]
    others = (server.process.pid, *server.processes("quire-http"))
    num_files = [server.num_files(pid) for pid in others]
    asking = Asking(server, bodies)
    for count, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT), start=1):
        asking.wait_for_text()
        gate.unlink()
        server.kill("quire-engine", number=number)
        wait_until(lambda: web.get(f"{server.url}/health").status_code == 503)
        gate.touch()
        wait_until(lambda count=count: server.metrics().get("quire_engine_restarts") == count)
    asking.wait().check_all()
    metrics = server.wait_until_idle()
    assert metrics["quire_engine_restarts"] == 3
    assert metrics["quire_faults_isolated"] == 0
    wait_until(lambda: all(server.num_files(pid) <= num + 1 for pid, num in zip(others, num_files, strict=True)))


def test_logprobs_usage_and_finish_reasons_are_those_of_an_undisturbed_run(serve):
    server = serve(engine={"step_s": 0.02})
    asked = body(5, max_tokens=60, logprobs=1, echo=True)

    def ask() -> dict[str, Any]:
        return web.post(f"{server.url}/v1/completions", json=asked).json()

    undisturbed = ask()
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask()))
    asking.start()
    time.sleep(0.5)  # of 1.2
    server.kill("quire-engine")
    in_the_gap = Asking(server, [body(n) for n in range(6)])
    asking.join()
    assert answers[0]["choices"] == undisturbed["choices"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [answers[0]["usage"][name] for name in counts] == [undisturbed["usage"][name] for name in counts]
    in_the_gap.wait().check_all()


def test_requests_that_come_in_the_gap_are_refused_where_that_is_asked_for(serve, tmp_path):
    gate = tmp_path / "gate"
    server = serve_with_gate(serve, gate, {"wait_for_restart": False})
    gate.unlink()
    server.kill("quire-engine")
    wait_until(lambda: web.get(f"{server.url}/health").status_code == 503)
    refused = web.post(f"{server.url}/v1/completions", json=body(1))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    gate.touch()
    server.wait_until_healthy()
    assert web.post(f"{server.url}/v1/completions", json=body(1)).status_code == 200


@LONG
def test_an_engine_that_stands_still_before_it_is_ready_is_replaced(serve):
    server = serve(engine={"step_s": 0.01, "build_s": 1.0}, settings={"restart_after_s": 2.0}, starting_factor=10)
    asking = Asking(server, [body(n, max_tokens=100) for n in range(8)])
    asking.wait_for_text()
    first = server.processes("quire-engine")
    server.kill("quire-engine")
    wait_until(lambda: server.processes("quire-engine") not in (first, []))
    server.kill("quire-engine", number=signal.SIGSTOP)
    asking.wait().check_all()
    assert server.metrics()["quire_engine_restarts"] == 2


def check_one_fails_alone(server: Server, mark: Mark, among: int = 16, num_blamed: int = 1) -> None:
    bodies = [body(n, max_tokens=40) for n in range(among)]
    culprit = among // 2 + 1
    bodies[culprit] |= {"seed": int(mark)}
    asking = Asking(server, bodies).wait()
    heard = asking.heard.pop(culprit)
    asking.bodies.pop(culprit)
    asking.check_all()
    assert heard.error is not None
    assert "the steps of this request fail" in heard.error["error"]["message"]
    assert server.wait_until_idle()["quire_faults_isolated"] == num_blamed
    server.wait_for_log("makes its steps fail and is ended", times=num_blamed)
    assert len(server.logged("makes its steps fail and is ended")) == num_blamed
    assert web.get(f"{server.url}/health/generate").status_code == 200


def test_one_of_sixteen_whose_steps_fail_fails_alone(serve):
    server = serve(engine={"step_s": 0.005})
    check_one_fails_alone(server, Mark.AT_SUBMIT)
    check_one_fails_alone(server, Mark.AT_RESULT, num_blamed=2)
    assert server.metrics()["quire_engine_restarts"] == 0


def test_one_of_sixteen_that_kills_the_engine_fails_alone(serve):
    """By ends of engines that do not count as those of one that cannot be kept running."""
    server = serve(engine={"step_s": 0.005}, settings={"max_engine_restarts": 3})
    check_one_fails_alone(server, Mark.KILLS)
    assert server.metrics()["quire_engine_restarts"] > 3


def test_an_engine_that_is_stuck_or_stands_still_is_replaced(serve):
    """Found among four here, to be quick; `make chaos` has sixteen."""
    server = serve(engine={"step_s": 0.005}, settings={"restart_after_s": 2.0})
    check_one_fails_alone(server, Mark.HANGS, among=4)
    server.wait_for_log("quire-engine is killed")
    asking = Asking(server, [body(n, max_tokens=300) for n in range(8)])
    asking.wait_for_text()
    stopped = server.processes("quire-engine")[0]
    os.kill(stopped, signal.SIGSTOP)
    asking.wait().check_all()
    wait_until(lambda: not is_there(stopped))
    server.wait_for_log("has not been heard of")
