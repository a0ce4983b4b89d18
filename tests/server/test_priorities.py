"""The priorities that requests may have, by API key."""

import threading
from pathlib import Path

import pytest

from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.gate import Gate

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[plain]\nkey = "plain"\n[first]\nkey = "first"\nmin_priority = -10\n[last]\nkey = "last"\nmin_priority = 5\n'
    )
    return file


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open()


def ask(server, key: str, priority: int | None = None, path: str = "/v1/completions"):
    body = BODIES[path] | ({} if priority is None else {"priority": priority})
    return web.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", BODIES)
def test_a_key_may_lower_its_requests_and_raise_them_as_far_as_the_file_says(make_server, keys_file, path):
    server = make_server(settings=ServerSettings(api_keys_file=keys_file, api_key="listed"))
    least = {"plain": 0, "listed": 0, "first": -10, "last": 5}
    for key, priority in least.items():
        for allowed in (None, priority, priority + 7, 2**31 - 1):
            assert ask(server, key, allowed, path).status_code == 200
        refused = ask(server, key, priority - 1, path)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "priority"
        assert error["message"].startswith(f"priority is {priority - 1}; with the API key ")
        assert f"it must be at least {priority}, its min_priority" in error["message"]


def test_without_keys_any_priority_is_allowed(make_server):
    server = make_server()
    for priority in (-(2**31) + 1, -1, 0, 1):
        assert ask(server, "any", priority).status_code == 200


def test_requests_of_a_key_that_comes_last_do_so_without_naming_a_priority(make_server, keys_file, gate):
    """On routes that have no such field too."""
    server = make_server(settings=ServerSettings(api_keys_file=keys_file), before_result=gate, max_batch_size=1)
    streams: list[Stream] = []

    def send(key: str, max_tokens: int) -> threading.Thread:
        body = {"inputs": "abc", "parameters": {"max_new_tokens": max_tokens}}
        headers = {"authorization": f"Bearer {key}"}
        sent = threading.Thread(target=lambda: web.post(f"{server.url}/generate", json=body, headers=headers))
        sent.start()
        server.wait_until(lambda: server.service.num_streams == len(streams) + 1)
        streams.extend(server.service._streams.difference(streams))
        return sent

    sent = [send("plain", 30)]
    gate.step_until(lambda: server.driver.engine.scheduler.num_running == 1)
    sent += [send("last", 2), send("plain", 2)]
    gate.open()
    for one in sent:
        one.join(WAIT_S)
    running, last, plain = (one.times.first_s or 0.0 for one in streams)
    assert 0.0 < running < plain < last
