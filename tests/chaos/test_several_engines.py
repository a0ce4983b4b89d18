"""Several engines behind one server: one of them ends in every way there is, and no answer does."""

import os
import signal
from pathlib import Path
from typing import Any

from quire.server.processes.child import KILLED
from tests import web
from tests.chaos.asking import Asking, body
from tests.chaos.conftest import LONG
from tests.chaos.faulty import Mark
from tests.chaos.server import Server, wait_until
from tests.patience import WAIT_S

TWO: dict[str, Any] = {"data_parallel": 2}


def running(server: Server) -> list[float]:
    """The sequences that run in each engine, as it last told."""
    found = server.metrics()
    return [found.get(f'tgi_batch_current_size{{engine="{number}"}}', 0) for number in range(2)]


def told(server: Server, name: str) -> list[float]:
    """A number of each engine, once both have told theirs."""
    names = [f'{name}{{engine="{number}"}}' for number in range(2)]
    wait_until(lambda: all(one in server.metrics() for one in names))
    metrics = server.metrics()
    return [metrics[one] for one in names]


def engine_pid(server: Server, number: int) -> int:
    def name(pid: int) -> str:
        return Path(f"/proc/{pid}/comm").read_text().strip()

    return next(pid for pid in server.processes("quire-engine") if name(pid) == f"quire-engine-{number}")


def start_two(serve, gate: Path | None = None, engine: dict[str, Any] | None = None, **settings: Any) -> Server:
    """Both engines are ready. Without the file `gate` none starts again."""
    asked = {"step_s": 0.01} | (engine or {})
    if gate is not None:
        gate.touch()
        asked["builds_after"] = str(gate)
    server = serve(engine=asked, settings=TWO | settings)
    server.wait_until_healthy()
    return server


def test_streams_of_an_engine_that_is_killed_go_on_with_the_other_at_once(serve, tmp_path):
    """No engine starts again before they have ended."""
    server = start_two(serve, tmp_path / "gate")
    bodies = [body(n, max_tokens=480) for n in range(14)] + [body(14, n=3, temperature=1), body(15, stop="a", n=2)]
    asking = Asking(server, bodies)
    wait_until(lambda: min(running(server)) > 0)  # both have some
    asking.wait_for_text()
    (tmp_path / "gate").unlink()
    os.kill(engine_pid(server, 1), signal.SIGKILL)
    asking.wait().check_all()
    assert web.get(f"{server.url}/health").status_code == 200  # one engine is enough
    assert list(server.troubles()) == [1]
    (tmp_path / "gate").touch()
    assert told(server, "quire_engine_restarts") == [0, 1]
    server.wait_until_idle()


def test_streams_go_on_when_all_engines_are_killed(serve):
    server = start_two(serve, http_workers=2)
    asking = Asking(server, [body(n, max_tokens=150) for n in range(20)])
    asking.wait_for_text()
    for number in (0, 1):
        os.kill(engine_pid(server, number), signal.SIGKILL)
    asking.wait().check_all()
    server.wait_until_idle()


def test_an_engine_that_stands_still_is_replaced_and_its_streams_go_on(serve, tmp_path):
    server = start_two(serve, tmp_path / "gate", restart_after_s=2.0)
    asking = Asking(server, [body(n, max_tokens=480) for n in range(12)])
    wait_until(lambda: min(running(server)) > 0)
    (tmp_path / "gate").unlink()
    os.kill(engine_pid(server, 0), signal.SIGSTOP)
    asking.wait().check_all()
    server.wait_for_log("quire-engine-0 is killed")


@LONG
def test_a_request_that_kills_engines_ends_alone_and_soon(serve):
    server = start_two(serve, engine={"step_s": 0.005}, max_engine_restarts=3)
    bodies = [body(n, max_tokens=60) for n in range(16)]
    bodies[9] |= {"seed": int(Mark.KILLS)}
    asking = Asking(server, bodies).wait()
    guilty = asking.heard.pop(9)
    asking.bodies.pop(9)
    asking.check_all()
    assert guilty.error is not None
    assert "the steps of this request fail" in guilty.error["error"]["message"]
    assert server.wait_until_idle()["quire_faults_isolated"] == 1
    # One engine ends once; the other one searches those that came from it, eight or a few more.
    ends = sorted(told(server, "quire_engine_restarts"))
    assert ends[0] <= 2
    assert ends[1] <= 12


def test_an_engine_that_is_given_up_leaves_the_others_serving(serve):
    server = start_two(serve, max_engine_restarts=0)
    os.kill(engine_pid(server, 1), signal.SIGKILL)
    wait_until(lambda: "it is not started again" in server.troubles().get(1, ""))
    Asking(server, [body(n) for n in range(8)]).wait().check_all()
    assert web.get(f"{server.url}/health/live").status_code == 200
    os.kill(engine_pid(server, 0), signal.SIGKILL)
    wait_until(lambda: web.get(f"{server.url}/health/live").status_code == 503)
    reason = web.get(f"{server.url}/health").json()["reason"]
    assert f"engine 0: the process of engine 0 ended ({KILLED})" in reason
    assert f"engine 1: the process of engine 1 ended ({KILLED})" in reason
    assert web.post(f"{server.url}/v1/completions", json=body(1)).status_code == 503


def test_a_signal_drains_all_engines(serve):
    server = start_two(serve)
    asking = Asking(server, [body(n, max_tokens=480) for n in range(8)])
    wait_until(lambda: min(running(server)) > 0)
    os.kill(engine_pid(server, 0), signal.SIGKILL)
    server.process.terminate()
    asking.wait().check_all()
    assert server.process.wait(WAIT_S) == 0


def test_prompts_that_begin_alike_meet_in_one_engine(serve):
    server = start_two(serve)
    for family in range(6):
        beginning = [family + 1] * 200
        for question in range(4):
            asked = {"prompt": [*beginning, question + 20, 3, 5], "max_tokens": 1}
            usage = web.post(f"{server.url}/v1/completions", json=asked).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= (200 if question else 0)
    server.wait_until_idle()
    assert all(told(server, "quire_prefix_hit_tokens")), "all were sent to one engine"


def test_metrics_are_those_of_each_engine_and_routers_see_the_sum(serve):
    server = start_two(serve)
    asking = Asking(server, [body(n, max_tokens=480) for n in range(8)])
    wait_until(lambda: min(running(server)) > 0)
    load = web.get(f"{server.url}/get_load").json()
    assert [one["dp_rank"] for one in load] == [0]
    metrics = server.metrics()
    assert "tgi_batch_current_size" not in metrics
    assert "tgi_request_count" in metrics  # counted by the HTTP workers
    assert [metrics[f'quire_pages_free{{engine="{number}"}}'] > 0 for number in (0, 1)] == [True, True]
    wait_until(lambda: 'tgi_batch_forward_duration_count{engine="1",method="decode"}' in server.metrics())
    asking.wait().check_all()
