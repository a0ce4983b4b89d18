"""Quire as an application of Ray Serve, on a cluster of one machine."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ray import serve

from quire.errors import InvalidSetting
from quire.ray import read_settings
from tests import web
from tests.chaos.server import wait_until

BODY = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 240, "stream": True}


def processes(name: str) -> list[int]:
    """Children of Ray's actors, of this name, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and (folder / "comm").read_text().strip() == name:
                pid = int(folder.name)
                if Path(f"/proc/{parent(pid)}/cmdline").read_bytes().startswith(b"ray::"):
                    found.append(pid)
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def text_of(lines: Iterator[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def ask(url: str) -> httpx.Response:
    return web.post(f"{url}/v1/completions", json=BODY)


def num_running() -> int:
    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def answers(url: str) -> bool:
    try:
        return ask(url).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_application_is_quires_own_and_streams(start):
    url = start()
    whole = ask(url).json()["choices"][0]["text"]
    with web.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as answer:
        assert text_of(answer.iter_lines()) == whole
    assert web.get(f"{url}/health").status_code == 200
    assert "tgi_queue_size" in web.get(f"{url}/metrics").text
    refused = web.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 10_000})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_stream_goes_on_when_the_engine_is_killed_and_another_replica_comes_when_that_is(start):
    url = start()
    whole = web.post(f"{url}/v1/completions", json=LONG | {"stream": False}).json()["choices"][0]["text"]
    with web.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        begun = next(lines)
        (engine,) = processes("quire-engine")
        os.kill(engine, signal.SIGKILL)
        assert text_of(iter([begun, *lines])) == whole
    (engine,) = processes("quire-engine")
    os.kill(parent(engine), signal.SIGKILL)  # the replica
    wait_until(lambda: engine not in processes("quire-engine"))
    wait_until(lambda: answers(url))


def test_another_replica_is_started_when_requests_wait_and_all_processes_end_with_the_application(start):
    url = start(max_replicas=2, target_ongoing_requests=1, upscale_delay_s=0)
    is_scaled = threading.Event()

    def keep_asking() -> None:
        while not is_scaled.is_set():
            web.post(f"{url}/v1/completions", json=LONG)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        try:
            wait_until(lambda: num_running() == 2)
        finally:
            is_scaled.set()
    assert all(one.exception() is None for one in asking)
    assert len(processes("quire-engine")) == 2
    serve.delete("default")
    wait_until(lambda: not processes("quire-engine"))


def test_a_group_goes_on_when_one_of_its_members_is_killed(start):
    url = start(group_size=2)
    before = ask(url).json()["choices"][0]["text"]
    (member,) = processes("quire-member")
    with web.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        begun = next(lines)
        os.kill(parent(member), signal.SIGKILL)  # the actor, and with it its process
        assert text_of(iter([begun, *lines]))
    assert processes("quire-member") not in ([], [member])
    assert ask(url).json()["choices"][0]["text"] == before


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"port": 8000}, "port"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"max_batch_size": "many"}, "max_batch_size"),
        ({"min_replicas": 3}, "min_replicas"),
        ({"group_size": 2, "data_parallel": 2}, "data_parallel"),
        (
            {"group_size": 2, "draft_model": "default", "speculate": 2},
            "draft_model is default; it does not go with group_size = 2",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(given, named):
    with pytest.raises(InvalidSetting, match=named):
        read_settings(given)


def test_settings_may_be_texts_as_the_command_line_has_them():
    config, settings, deployment = read_settings(
        {"model": "default", "max_batch_size": "8", "cache_dir": "/a", "api_key": "k", "max_replicas": "4"}
    )
    assert (config.max_batch_size, config.cache_dir, deployment.max_replicas) == (8, Path("/a"), 4)
    assert settings.api_key == "k"
