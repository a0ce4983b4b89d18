"""Kept responses of servers as processes."""

import json
import stat

import httpx
import pytest

from quire.server.service.response_database import KeptResponse, ResponseDatabase
from tests import web
from tests.patience import WAIT_S
from tests.server.processes import Served, wait_until

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
    assert not list(temporary.glob("quire-responses-*"))


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


def test_a_damaged_file_is_refused_at_the_start(model_folder, tmp_path):
    path = tmp_path / "kept.sqlite"
    database = ResponseDatabase(str(path), 100, 10**6, 60)
    for number in range(30):
        database.add("", KeptResponse(f"resp_{number}", None, b'{"a":"%b"}' % (b"x" * 5000)))
    database.close()
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * 8192)
    status, _, errors = Served(model_folder, f"response_store={path}").ended()
    assert status != 0
    assert f"setting: response_store is {str(path)!r}, which is damaged: " in errors


def test_two_servers_share_a_file_and_one_of_them_sees_that_the_other_was_killed(model_folder, tmp_path):
    file = f"response_store={tmp_path / 'kept.sqlite'}"
    one, two = [Served(model_folder, file, "step_s=0.02") for _ in range(2)]
    one.wait()
    two.wait()
    kept = ask_anew(one.url, **ASK).json()
    assert ask_anew(two.url, "GET", f"/{kept['id']}").json() == kept
    assert ask_anew(two.url, **ASK, previous_response_id=kept["id"]).status_code == 200
    begun = [ask_anew(one.url, input="hi", max_output_tokens=490, background=True).json()["id"] for _ in range(2)]
    one.wait_for_running(2)
    assert ask_anew(two.url, "POST", f"/{begun[0]}/cancel").json()["status"] == "cancelled"
    one.wait_for_running(1)
    assert ask_anew(two.url, "GET", f"/{begun[1]}").json()["status"] == "in_progress"
    one.process.kill()
    wait_until(lambda: ask_anew(two.url, "GET", f"/{begun[1]}").json()["status"] != "in_progress")
    failed = ask_anew(two.url, "GET", f"/{begun[1]}").json()
    assert (failed["status"], failed["error"]["message"]) == (
        "failed",
        "the process that worked on this response has ended",
    )
    one.process.wait()
    two.stop()
    three = Served(model_folder, file).wait()
    assert ask_anew(three.url, "GET", f"/{begun[1]}").json() == failed
    three.stop()
    assert [found.name for found in tmp_path.iterdir()] == ["kept.sqlite"]


def test_what_a_killed_server_leaves_in_the_temporary_folder_is_removed_by_the_next_start(model_folder, tmp_path):
    (tmp_path / "quire-responses-of-another-kind").symlink_to(tmp_path)
    kept = tmp_path / "kept"
    kept.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        killed = Served(model_folder, "http_workers=2").wait()
        other = Served(model_folder, "http_workers=2").wait()  # not removed by those that start while it runs
        assert ask_anew(killed.url, input="the launch code", max_output_tokens=1).status_code == 200
        both = set(tmp_path.glob("quire-responses-*/responses.sqlite"))
        assert len(both) == 2
        assert {stat.S_IMODE(found.parent.stat().st_mode) for found in both} == {0o700}
        killed.process.kill()
        killed.process.wait()
        assert set(tmp_path.glob("quire-responses-*/responses.sqlite")) == both
        later = Served(model_folder).wait()  # of one worker, which needs no such folder
    (left,) = tmp_path.glob("quire-responses-*/responses.sqlite")
    assert ask_anew(other.url, **ASK).json()["store"] is True
    later.stop()
    other.stop()
    assert not left.exists()
    assert [found.name for found in tmp_path.glob("quire-responses-*")] == ["quire-responses-of-another-kind"]
    assert kept.exists()
