"""Kept responses of servers as processes."""

import json

import httpx
import pytest

from tests import web
from tests.patience import WAIT_S
from tests.server.processes import Served

ASK = {"input": "hi", "max_output_tokens": 3}


def ask_anew(url: str, method: str = "POST", path: str = "", **fields) -> httpx.Response:
    """On a connection of its own, which any worker may accept."""
    with httpx.Client(timeout=WAIT_S) as client:
        return client.request(method, f"{url}/v1/responses{path}", json=fields or None)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def workers(model_folder, temporary):
    """Two HTTP workers, with a folder of their own for temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        server = Served(model_folder, "http_workers=2", "step_s=0.03").wait()
    assert list(temporary.glob("quire-*/responses.sqlite"))
    yield server
    server.stop()
    assert not list(temporary.glob("quire-*"))


def test_every_worker_knows_the_responses_of_the_others(workers):
    first = ask_anew(workers.url, **ASK).json()
    found = [
        ask_anew(workers.url, "GET", f"/{first['id']}") for _ in range(16)
    ]  # by chance all to one worker: 1 in 32,768
    assert {answer.status_code for answer in found} == {200}
    previous = first
    for _ in range(8):
        answer = ask_anew(workers.url, **ASK, previous_response_id=previous["id"])
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["input_tokens"] > previous["usage"]["input_tokens"]
        previous = answer.json()


def test_a_response_is_cancelled_through_any_worker(workers):
    begun = [ask_anew(workers.url, input="hi", max_output_tokens=490, background=True).json()["id"] for _ in range(4)]
    workers.wait_for_running(4)
    for response_id in begun:
        assert ask_anew(workers.url, "POST", f"/{response_id}/cancel").json()["status"] == "cancelled"
    workers.wait_for_running(0)
    for response_id in begun:
        assert ask_anew(workers.url, "GET", f"/{response_id}").json()["status"] == "cancelled"


def test_a_stream_is_kept_before_its_end_is_sent(workers):
    for _ in range(8):
        with web.stream("POST", f"{workers.url}/v1/responses", json=ASK | {"stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        ended = json.loads(lines[-1].removeprefix("data: "))["response"]
        assert ask_anew(workers.url, "GET", f"/{ended['id']}").json() == ended


def test_a_file_keeps_responses_over_restarts_and_those_that_end_while_the_server_stops(model_folder, tmp_path):
    file = f"response_store={tmp_path / 'kept.sqlite'}"
    server = Served(model_folder, file, "step_s=0.02").wait()
    kept = ask_anew(server.url, **ASK).json()
    begun = ask_anew(server.url, input="hi", max_output_tokens=200, background=True).json()
    server.wait_for_running(1)
    server.stop()
    again = Served(model_folder, file).wait()
    assert ask_anew(again.url, "GET", f"/{kept['id']}").json() == kept
    ended = ask_anew(again.url, "GET", f"/{begun['id']}").json()
    assert (ended["status"], ended["usage"]["output_tokens"]) == ("incomplete", 200)
    again.stop()


def test_a_server_does_not_start_with_a_file_that_is_something_else(model_folder, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("not a database " * 100)
    server = Served(model_folder, f"response_store={notes}")
    status, _, errors = server.ended()
    assert status != 0
    assert "setting: response_store is" in errors
