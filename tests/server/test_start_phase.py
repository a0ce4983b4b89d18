"""While a server starts, /health, its page and the log name the phase, and how far it is."""

import asyncio
import logging
import re
import subprocess
import sys

import httpx

from quire.files.progress import silent
from quire.ipc.messages import Ready, Waiting
from quire.server.processes.engine_process import EngineProcess
from quire.server.processes.start_phase import LOG_S, TELL_S, StartPhase
from tests import web
from tests.server.fake_engine import FakeEngine
from tests.server.processes import Served, free_port, wait_until
from tests.server.test_engine_process import Front, until
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model


class Told:
    """What is told, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.phase = StartPhase(self.lines.append, clock=lambda: self.now)


def test_a_piece_of_work_is_a_phase_with_its_share():
    told = Told()
    with told.phase.told(silent)("Loading weights") as report:
        for done in range(1, 5):
            told.now += TELL_S
            report(done, 4)
    assert told.lines == [
        "the engine is starting: loading weights",
        *(f"the engine is starting: loading weights, {percent} %" for percent in (25, 50, 75, 100)),
    ]


def test_progress_is_told_only_so_often_and_a_new_phase_at_once():
    told = Told()
    told.phase.begin("compiling programs")
    for number in range(80):
        told.now += TELL_S / 8
        told.phase.note(f"compiling {number + 1} of 80 programs")
    told.phase.begin("the next")
    assert len(told.lines) == 1 + 10 + 1
    assert told.lines[-2] == "the engine is starting: compiling 80 of 80 programs"


def test_the_log_has_a_phase_that_takes_long(caplog):
    caplog.set_level(logging.INFO)
    told = Told()
    told.phase.begin("compiling programs")
    for number in range(1, 31):
        told.now += LOG_S / 10
        told.phase.note(f"compiling {number} of 30 programs")
    assert [record.getMessage() for record in caplog.records] == [
        f"starting: compiling {number} of 30 programs" for number in (10, 20, 30)
    ]


def test_an_engine_of_a_model_tells_its_phases(tmp_path_factory):
    model, cache = write_tiny_chat_model(tmp_path_factory.mktemp("tiny")), program_folder(tmp_path_factory)
    code = (
        "from quire.settings.config import Config\n"
        "from quire.ipc.messages import Waiting\n"
        "from quire.server.processes.model_engine import ModelEngine\n"
        f"config = Config({str(model)!r}, cache_dir={str(cache)!r}, **{SIZES!r})\n"
        "tell = lambda news: print(news.reason, flush=True) if isinstance(news, Waiting) else None\n"
        "engine = ModelEngine(config, show_progress=False)(tell)\n"
        "print(*engine.executor.programs.num_made_of_needed)\n"
        "engine.executor.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *told, counted = done.stdout.splitlines()
    phases = [line.removeprefix("the engine is starting: ") for line in told]
    assert "the engine is starting: loading JAX" in told
    counts = [found for phase in phases if (found := re.fullmatch(r"[a-z]+ (\d+) of (\d+) programs", phase))]
    assert counts  # they are compiled, or loaded where another test has compiled them
    first = phases.index(counts[0][0])
    assert phases.index("loading JAX") < phases.index("making random weights") < first
    num_made, num_needed = map(int, counted.split())
    assert 0 < num_made <= num_needed  # those that are kept may be loaded behind the first of them
    assert all(int(found[1]) <= int(found[2]) == num_needed for found in counts)


def test_front_ends_hear_each_phase_and_later_ones_the_last(tmp_path):
    may_go_on = tmp_path / "may go on"
    engine = FakeEngine(tmp_path, builds_after=may_go_on, phases=("loading weights", "compiling 12 of 30 programs"))

    async def run() -> None:
        process = EngineProcess(str(tmp_path / "engine"), engine)
        running = asyncio.create_task(process.run())
        first = await Front().join(tmp_path / "engine")
        await until(lambda: len(first.of(Waiting)) > 0 and "12 of 30" in first.of(Waiting)[-1].reason)
        later = await Front().join(tmp_path / "engine")
        await until(lambda: len(later.of(Waiting)) > 0)
        assert [told.reason for told in later.of(Waiting)] == ["the engine is starting: compiling 12 of 30 programs"]
        may_go_on.touch()
        await until(lambda: len(later.of(Ready)) > 0)
        after = await Front().join(tmp_path / "engine")
        await until(lambda: len(after.of(Ready)) > 0)
        assert not after.of(Waiting)
        process.stop()
        await running

    asyncio.run(run())


def test_health_and_every_route_name_the_phase(model_folder, tmp_path):
    port, may_go_on = free_port(), tmp_path / "may go on"
    url = f"http://127.0.0.1:{port}"
    served = Served(model_folder, f"builds_after={may_go_on}", "phase=compiling 12 of 30 programs", f"port={port}")
    reason = "the engine is starting: compiling 12 of 30 programs"

    def found() -> object:
        try:
            answer = web.get(f"{url}/health")
        except httpx.TransportError:
            return None
        return answer.status_code, answer.json()["reason"]

    try:
        wait_until(lambda: found() == (503, reason))
        answer = web.post(f"{url}/v1/completions", json={"prompt": "abc"})
        assert (answer.status_code, answer.json()["reason"]) == (503, reason)
        assert web.get(f"{url}/health/live").status_code == 200
        may_go_on.touch()
        served.wait()
        assert web.get(f"{url}/health").status_code == 200
    finally:
        served.stop()
