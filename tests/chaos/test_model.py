"""The same on JAX: a small model, whose answers must be those that it gave when nothing went wrong."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.asking import Asking
from tests.chaos.clients import Heard, stream_all
from tests.chaos.faulty import Mark
from tests.chaos.server import Server
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model

CULPRIT = 9
LONG = pytest.mark.skipif(os.environ.get("QUIRE_CHAOS") != "long", reason="takes many engines; part of `make chaos`")


def body(number: int, max_tokens: int = 48) -> dict[str, Any]:
    return {"prompt": f"number {number}", "max_tokens": max_tokens, "temperature": number % 2, "seed": number}


BODIES = [body(number) for number in range(16)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    config = SIZES | {"max_batch_size": 16, "dtype": "float32", "cache_dir": str(program_folder(tmp_path_factory))}
    one = Server("model", model, config=config, settings={"restart_after_s": 2.0}).wait()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[str]]:
    heard = asyncio.run(stream_all(server.url, BODIES))
    assert all(one.is_complete for one in heard)
    return [one.texts for one in heard]


def check(heard: list[Heard], undisturbed: list[list[str]], culprit: int | None = None) -> None:
    for number, one in enumerate(heard):
        if number != culprit:
            assert one.error is None, one.error
            assert one.texts == undisturbed[number], f"request {number}"
            assert one.is_complete


def test_sixteen_streams_go_on_when_the_engine_is_killed(server, undisturbed):
    asking = Asking(server, BODIES)
    asking.wait_for_text()
    server.kill("quire-engine", number=signal.SIGKILL)
    check(asking.wait().heard, undisturbed)
    assert server.wait_until_idle()["quire_engine_restarts"] >= 1


@pytest.mark.parametrize(
    "mark",
    [Mark.AT_SUBMIT, Mark.AT_RESULT, pytest.param(Mark.KILLS, marks=LONG), pytest.param(Mark.HANGS, marks=LONG)],
    ids=lambda mark: mark.name,
)
def test_one_of_sixteen_fails_alone(server, undisturbed, mark):
    bodies = [one | {"seed": int(mark)} if number == CULPRIT else one for number, one in enumerate(BODIES)]
    heard = asyncio.run(stream_all(server.url, bodies, timeout_s=300))  # for many engines
    check(heard, undisturbed, CULPRIT)
    assert heard[CULPRIT].error is not None
    assert "the steps of this request fail" in heard[CULPRIT].error["error"]["message"]
    metrics = server.wait_until_idle()
    assert metrics["quire_late_compilations"] == 0
