"""An answer keeps the adapter that it began with, whatever becomes of its name and of its engine."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.request import Request, SamplingParams
from tests import web
from tests.fake_executor import expected_tokens
from tests.server.processes import Served, wait_until
from tests.server.vocabulary import served_model

PROMPT = [1, 2, 3]
NUM_TOKENS = 120
STEP_S = 0.02


def write(root: Path, name: str, number: int) -> None:
    """An adapter whose weights are a number."""
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "adapter_config.json").write_text(json.dumps({"number": number}))


def expected_text(number: int) -> str:
    asked = Request(0, tuple(PROMPT), NUM_TOKENS, SamplingParams(temperature=0))
    return served_model().tokenizer.decode(expected_tokens(asked, adapter=number))


class Answer:
    """A stream that is read by a thread."""

    def __init__(self, served: Served, model: str) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self._body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "model": model, "stream": True}
        self._url = f"{served.url}/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with web.stream("POST", self._url, json=self._body) as response:
            if response.status_code != 200:
                self.error = json.loads(response.read())["error"]
                return
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = event.get("error", self.error)
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    def wait_for_text(self) -> "Answer":
        wait_until(lambda: bool(self.text) or not self._thread.is_alive())
        assert self.error is None
        return self

    def wait(self) -> "Answer":
        self._thread.join()
        return self


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(("first", "second", "third"), start=1001):
        write(tmp_path, name, number)
    return tmp_path


Serve = Callable[..., Served]


@pytest.fixture
def serve(model_folder: Path, root: Path) -> Iterator[Serve]:
    """A server on which `c` is `second`."""
    made: list[Served] = []

    def start(*settings: str) -> Served:
        served = Served(model_folder, f"adapters={root}", f"step_s={STEP_S}", *settings)
        made.append(served)
        served.wait()
        wait_until(lambda: is_well(served))
        load(served, "c", "second")
        return served

    yield start
    for one in made:
        one.stop()


def is_well(served: Served) -> bool:
    """All engines are ready."""
    answer = web.get(f"{served.url}/health")
    engines = answer.json()["engines"] if answer.status_code == 200 and answer.content else []
    return answer.status_code == 200 and all(one["reason"] is None for one in engines)


def load(served: Served, name: str, path: str, **fields: Any) -> None:
    answer = web.post(f"{served.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})
    assert answer.status_code == 200, answer.text


def unload(served: Served, name: str) -> None:
    assert web.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def test_an_answer_goes_on_with_its_adapter_that_was_replaced_before_its_engine_is_killed(serve: Serve) -> None:
    served = serve()
    begun = [Answer(served, "c") for _ in range(3)]
    for one in begun:
        one.wait_for_text()
    load(served, "c", "third", load_inplace=True)
    later = Answer(served, "c").wait_for_text()
    os.kill(served.engine_pid(), signal.SIGKILL)
    for one in begun:
        assert (one.wait().text, one.error) == (expected_text(1002), None)
    assert later.wait().text == expected_text(1003)
    assert Answer(served, "c").wait().text == expected_text(1003)


def test_an_answer_goes_on_with_its_adapter_that_was_unloaded_before_its_engine_is_killed(serve: Serve) -> None:
    served = serve()
    begun = Answer(served, "c").wait_for_text()
    unload(served, "c")
    os.kill(served.engine_pid(), signal.SIGKILL)
    assert (begun.wait().text, begun.error) == (expected_text(1002), None)
    refused = Answer(served, "c").wait()
    assert refused.error is not None
    assert refused.error["code"] == "model_not_found"


def test_an_answer_whose_adapter_cannot_be_had_again_ends_with_the_reason(serve: Serve, root: Path) -> None:
    """Its files were written over. Other tokens would be those of another adapter."""
    served = serve()
    begun = [Answer(served, "c").wait_for_text() for _ in range(2)]
    other = Answer(served, "first").wait_for_text()
    write(root, "second", 77)
    load(served, "c", "second", load_inplace=True)
    os.kill(served.engine_pid(), signal.SIGKILL)
    for one in begun:
        assert one.wait().error is not None
        assert "adapter 'c'" in one.error["message"]
        assert "its files have changed" in one.error["message"]
        assert expected_text(1002).startswith(one.text)
    assert other.wait().text == expected_text(1001)
    assert Answer(served, "c").wait().text == expected_text(77)


@pytest.mark.parametrize("num_killed", [1, 2])
def test_answers_of_several_engines_go_on_with_the_adapters_that_they_began_with(serve: Serve, num_killed: int) -> None:
    """Those that were loaded while the engines ran, then replaced and unloaded."""
    served = serve("data_parallel=2")
    load(served, "d", "third")
    begun = [(Answer(served, name), number) for name, number in (("c", 1002), ("d", 1003)) * 3]
    for one, _ in begun:
        one.wait_for_text()
    load(served, "c", "first", load_inplace=True)
    unload(served, "d")
    for number in range(num_killed):
        os.kill(served.named(f"quire-engine-{number}")[-1], signal.SIGKILL)
    for one, number in begun:
        assert (one.wait().text, one.error) == (expected_text(number), None)
    assert Answer(served, "c").wait().text == expected_text(1001)
