"""Adapters by name in every API, and their loading and unloading by clients."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.driver import Driver
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.processes import Served, wait_until
from tests.server.running import RunningServer, new_driver

PROMPT = [1, 2, 3]


def folder_of(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("first", "second", "third"):
        folder_of(tmp_path / "allowed", name)
    folder_of(tmp_path, "outside")
    return tmp_path / "allowed"


@pytest.fixture
def server(root: Path) -> Iterator[RunningServer]:
    """With `a`, whose number is 1, and `b`, whose number is 2."""
    running = RunningServer(
        adapters={"a": root / "first", "b": root / "second"}, adapter_folder=root, max_loras=1
    ).start()
    yield running
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    server.wait_until(lambda: len(server.model.adapters) == 2)
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def complete(client: httpx.Client, model: str | None, max_tokens: int = 5, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body | ({} if model is None else {"model": model}))


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def load(client: httpx.Client, name: str, path: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_the_model_field_names_an_adapter(server: RunningServer, client: httpx.Client) -> None:
    for model, number in (("a", 1), ("b", 2), (server.model.name, 0), (None, 0), ("tgi", 0), ("a", 1)):
        response = complete(client, model)
        assert text_of(response) == server.expected_text(PROMPT, 5, number)
        assert response.json()["model"] == (model if number else server.model.name)


def test_every_api_knows_the_adapter(server: RunningServer, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "b"}]
    chat = {"messages": messages, "max_tokens": 3, "temperature": 0}
    answers = {}
    for model in ("a", "b"):
        body = chat | {"model": model}
        answered = client.post("/v1/chat/completions", json=body).json()
        assert answered["model"] == model
        answers[model] = answered["choices"][0]["message"]["content"]
        theirs = client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}).json()
        assert (theirs["model"], theirs["content"][0]["text"]) == (model, answers[model])
        asked = {"model": model, "input": "b", "max_output_tokens": 3, "temperature": 0}
        response = client.post("/v1/responses", json=asked).json()
        assert (response["model"], response["output"][0]["content"][0]["text"]) == (model, answers[model])
    assert answers["a"] != answers["b"]


def test_adapter_id_is_the_parameter_of_tgi(server: RunningServer, client: httpx.Client) -> None:
    inputs = server.model.tokenizer.decode(PROMPT)
    for adapter, number in (("a", 1), ("b", 2), (None, 0)):
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 5, "adapter_id": adapter}}
        answered = client.post("/generate", json=body)
        assert answered.status_code == 200, answered.text
        (prompt,) = server.model.tokenizer.encode_batch([inputs])
        assert answered.json()["generated_text"] == server.expected_text(prompt, 5, number)
    refused = client.post("/generate", json={"inputs": inputs, "parameters": {"adapter_id": "c"}})
    assert refused.status_code == 404
    assert "adapter_id 'c' does not exist" in refused.json()["error"]


def test_an_unknown_name_is_refused_with_those_that_exist(client: httpx.Client) -> None:
    refused = complete(client, "c")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "and the adapters a, b" in refused.json()["error"]["message"]
    assert client.get("/v1/models/c").status_code == 404


def test_models_are_listed_with_their_parent(server: RunningServer, client: httpx.Client) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == [server.model.name, "a", "b"]
    assert "parent" not in cards[server.model.name]
    assert cards["a"]["parent"] == server.model.name
    assert client.get("/v1/models/a").json() == cards["a"]
    theirs = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [card["id"] for card in theirs["data"]] == [server.model.name, "a", "b"]
    assert theirs["last_id"] == "b"


def test_clients_see_no_path_of_the_machine(client: httpx.Client, root: Path) -> None:
    listed = [client.get("/v1/models"), client.get("/v1/models/a"), client.get("/info"), client.get("/server_info")]
    refused = [load(client, "c", path) for path in ("missing", str(root / "missing"), "..")]
    assert refused[0].json()["error"]["message"].startswith("missing: there is no adapter_config.json")
    assert "must be below the folder" in refused[2].json()["error"]["message"]
    for answer in (*listed, refused[0], refused[1]):
        assert str(root) not in answer.text


def test_adapters_come_and_go_while_serving(server: RunningServer, client: httpx.Client, root: Path) -> None:
    loaded = load(client, "c", "third")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert text_of(complete(client, "c")) == server.expected_text(PROMPT, 5, 3)
    again = load(client, "c", str(root / "third"))
    assert again.status_code == 400
    assert "loaded already" in again.json()["error"]["message"]
    assert load(client, "c", str(root / "third"), load_inplace=True).status_code == 200
    assert text_of(complete(client, "c")) == server.expected_text(PROMPT, 5, 4), "pages of the old one were reused"
    removed = unload(client, "c")
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
    assert complete(client, "c").status_code == 404
    assert unload(client, "c").status_code == 404


@pytest.mark.parametrize("path", ["../outside", "..", "/", "first/../../outside"])
def test_paths_outside_the_folder_are_refused(client: httpx.Client, root: Path, path: str) -> None:
    refused = load(client, "c", path)
    assert refused.status_code == 400
    assert "must be below the folder" in refused.json()["error"]["message"]


def test_links_that_lead_outside_are_refused(client: httpx.Client, root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    assert "must be below the folder" in load(client, "c", "link").json()["error"]["message"]


def test_a_broken_adapter_is_refused_and_leaves_the_others(server: RunningServer, client: httpx.Client) -> None:
    refused = load(client, "a", "missing", load_inplace=True)
    assert refused.status_code == 400
    assert "no adapter_config.json" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "invalid_adapter"
    assert text_of(complete(client, "a")) == server.expected_text(PROMPT, 5, 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "default", "lora_path": "third"}, "lora_name"),
        ({"lora_name": "", "lora_path": "third"}, "lora_name"),
        ({"lora_name": "x" * 300, "lora_path": "third"}, "lora_name"),
        ({"lora_name": "c,d", "lora_path": "third"}, "lora_name"),  # in metrics it would be two
        ({"lora_name": "c", "lora_path": ""}, "lora_path"),
        ({"lora_name": "c", "lora_path": "\0"}, "lora_path"),
        ({"lora_name": "c"}, "lora_path"),
        ({"lora_name": "c", "lora_path": "third", "more": 1}, "more"),
    ],
)
def test_wrong_fields_are_refused_by_name(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    refused = client.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_requests_finish_with_an_adapter_that_is_unloaded_meanwhile(root: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def before_result(plan: Any, prompts: Any) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)

    server = RunningServer(
        adapters={"a": root / "first"}, adapter_folder=root, max_loras=1, before_result=before_result
    ).start()
    answers: list[httpx.Response] = []
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        server.wait_until(lambda: "a" in server.model.adapters)
        asking = threading.Thread(target=lambda: answers.append(complete(client, "a")))
        asking.start()
        assert begun.wait(WAIT_S)
        unloading = threading.Thread(target=lambda: answers.append(unload(client, "a")))
        unloading.start()
        goes_on.set()
        asking.join()
        unloading.join()
        assert {answer.status_code for answer in answers} == {200}
        texts = [answer.json()["choices"][0]["text"] for answer in answers if answer.text.startswith("{")]
        assert texts == [server.expected_text(PROMPT, 5, 1)]
        assert complete(client, "a").status_code == 404
    server.stop()


def test_loading_is_off_unless_asked_for(root: Path) -> None:
    server = RunningServer(adapters={"a": root / "first"}, max_loras=1).start()
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        server.wait_until(lambda: "a" in server.model.adapters)
        for refused in (load(client, "c", "third"), unload(client, "a")):
            assert refused.status_code == 404
            assert "--adapter-folder" in refused.json()["error"]["message"]
        assert complete(client, "a").status_code == 200
    server.stop()


def test_loading_needs_the_key(root: Path) -> None:
    server = RunningServer(settings=ServerSettings(api_key="secret"), adapter_folder=root, max_loras=1).start()
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        assert load(client, "c", "third").status_code == 401
        assert unload(client, "c").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert load(client, "c", "third").status_code == 200
    server.stop()


def followed(server: RunningServer, root: Path) -> Driver:
    """The driver of the engine that takes over, with the adapters of the settings."""
    following = new_driver(adapters={"a": root / "first", "b": root / "second"}, adapter_folder=root, max_loras=1)
    following.start()

    def change() -> None:
        server.service.engine_lost("the engine has ended")
        server.service.connect(following.open(server.service.deliver, 7))

    server.loop.call_soon_threadsafe(change)
    return following


def test_the_next_engine_has_the_adapters_that_were_loaded(
    server: RunningServer, client: httpx.Client, root: Path
) -> None:
    """It begins with those of its settings, of which one was unloaded."""
    assert load(client, "c", "third").status_code == 200
    assert unload(client, "b").status_code == 200
    following = followed(server, root)
    server.wait_until(lambda: following.engine.adapters.folders.keys() == {"a", "c"})
    assert text_of(complete(client, "c")) == server.expected_text(PROMPT, 5, 3)
    assert complete(client, "b").status_code == 404
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [server.model.name, "a", "c"]
    following.stop()


def test_an_adapter_that_the_next_engine_cannot_read_is_gone_and_can_be_loaded_again(
    server: RunningServer, client: httpx.Client, root: Path
) -> None:
    """Also one that was loaded in place of one of the settings: nothing is answered by that in its stead."""
    assert load(client, "c", "third").status_code == 200
    assert load(client, "a", "third", load_inplace=True).status_code == 200
    (root / "third").rename(root / "moved")
    following = followed(server, root)
    server.wait_until(lambda: server.model.adapters.keys() == {"b"})
    assert complete(client, "a").status_code == complete(client, "c").status_code == 404
    assert unload(client, "c").status_code == 404
    assert load(client, "c", "moved").status_code == 200
    assert complete(client, "c").status_code == 200
    following.stop()


def test_all_workers_agree_and_an_engine_that_was_killed_has_its_adapters_again(model_folder: Path, root: Path) -> None:
    served = Served(model_folder, f"adapters={root}", "http_workers=2").wait()
    try:
        wait_until(lambda: web.get(f"{served.url}/health").status_code == 200)
        loading = {"lora_name": "c", "lora_path": "third"}
        assert web.post(f"{served.url}/v1/load_lora_adapter", json=loading).status_code == 200

        def answers(name: str) -> set[tuple[int, str]]:
            """Of several connections, so that both workers are asked."""
            body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "model": name}
            asked = [served.ask(body) for _ in range(8)]
            return {(one.status_code, one.json().get("choices", [{"text": ""}])[0]["text"]) for one in asked}

        before: set[tuple[int, str]] = set()

        def all_know_them() -> bool:
            before.clear()
            before.update(answers("c") | answers("first"))
            return {status for status, _ in before} == {200}

        wait_until(all_know_them)  # the worker that was not asked to load it hears of it later
        assert len(before) == 2
        os.kill(served.engine_pid(), signal.SIGKILL)
        wait_until(lambda: served.named("quire-engine") != [] and answers("c") | answers("first") == before)
    finally:
        served.stop()


def test_the_name_of_a_model_in_a_path_can_be_an_adapters(server: RunningServer, client: httpx.Client) -> None:
    data = list(server.model.tokenizer.decode(PROMPT).encode())
    given = {"name": "in", "shape": [1], "datatype": "BYTES", "data": data}
    body = {"id": "1", "inputs": [given], "outputs": [{"name": "out"}], "parameters": {"max_new_tokens": 5}}
    texts = []
    for name in ("a", "b", server.model.name):
        answered = client.post(f"/v2/models/{name}/versions/1/infer", json=body)
        assert answered.status_code == 200, answered.text
        texts.append(bytes(answered.json()["outputs"][0]["data"]).decode())
    assert len(set(texts)) == 3
