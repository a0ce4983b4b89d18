"""The examples of docs/api.md: each runs, and its answer is as the page shows it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from quire.files.packaged_model import DEFAULT_MODEL
from quire.server.http.route import RouteTable
from quire.server.http.routes import ROUTES
from tests.docs.curl import Sent, read_curl
from tests.server.running import RunningServer
from tests.server.vocabulary import served_model

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
ANY = "…"


class Example(NamedTuple):
    sent: Sent
    language: str  # of the shown answer
    answer: str

    @property
    def name(self) -> str:
        return f"{self.sent.method} {self.sent.path}"


def examples() -> Iterator[Example]:
    section = API.split("\n## Examples\n", 1)[1].split("\n## ", 1)[0]
    for command, language, answer in re.findall(
        r"```sh\ncurl ([^\n]+)\n```\n(?:```(\w+)\n(.*?)\n```\n)?", section, re.DOTALL
    ):
        yield Example(read_curl(command), language, answer)


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "style").mkdir()
    (folder / "style" / "adapter_config.json").write_text("{}")
    model = replace(served_model(), name=DEFAULT_MODEL.name, adapters={})
    running = RunningServer(model=model, adapter_folder=folder, max_loras=1).start()
    yield running
    running.stop()


def ask(server: RunningServer, example: Example, response_id: str) -> httpx.Response:
    return example.sent._replace(path=example.sent.path.replace("$ID", response_id)).to(server.url)


def new_response(server: RunningServer) -> str:
    """The id for examples that need one."""
    asked = next(one for one in EXAMPLES if one.name == "POST /v1/responses")
    return ask(server, asked, "").json()["id"]


def differences(shown: Any, found: Any, path: str = "") -> list[str]:
    """What the page shows and the answer does not have. Numbers may be others, and lists longer."""
    if isinstance(shown, dict) and isinstance(found, dict):
        missing = [f"{path}.{key} is missing" for key in shown if key not in found]
        return missing + [
            one for key in shown if key in found for one in differences(shown[key], found[key], f"{path}.{key}")
        ]
    if isinstance(shown, list) and isinstance(found, list) and len(shown) <= len(found):
        pairs = zip(shown, found, strict=False)
        return [one for index, pair in enumerate(pairs) for one in differences(*pair, f"{path}[{index}]")]
    if isinstance(shown, str) and isinstance(found, str):
        pattern = re.escape(shown).replace(re.escape(ANY), ".*")
        return [] if re.fullmatch(pattern, found, re.DOTALL) else [f"{path} is {found!r}, not {shown!r}"]
    if is_number(shown) and is_number(found):
        return []
    return [] if shown == found else [f"{path} is {found!r}, not {shown!r}"]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def wrong_lines(shown: str, found: str) -> list[str]:
    """Lines of a text, or events, which begin alike; the last of several is also the last."""
    lines = [line for line in found.splitlines() if line]
    wanted = shown.splitlines()
    placed = [*zip(wanted, lines, strict=False)]
    if wanted[-1] == "data: [DONE]":
        placed[-1] = (wanted[-1], lines[-1])
    problems = []
    for line, answered in placed:
        is_event = line.startswith("data:") and line.endswith("}")
        if is_event and answered.startswith("data:"):
            problems += differences(*(json.loads(one.removeprefix("data:")) for one in (line, answered)))
        else:
            problems += differences(line, answered)
    return problems


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.name)
def test_an_example_is_answered_as_the_page_shows(server, example):
    answer = ask(server, example, new_response(server) if "$ID" in example.sent.path else "")
    assert answer.status_code == 200, answer.text
    if example.language == "json":
        assert differences(json.loads(example.answer), answer.json()) == []
    elif example.language == "text":
        assert wrong_lines(example.answer, answer.text) == []
    else:
        assert answer.text == ""


def test_every_route_has_an_example():
    table = RouteTable(ROUTES)
    shown = [table.find({"path": one.sent.path, "method": one.sent.method}) for one in EXAMPLES]
    missing = {(route.method, route.path) for route in ROUTES} - {(route.method, route.path) for route in shown}
    assert not missing


def test_a_wrong_example_is_found_out():
    found = {"a": [{"b": 1, "c": "abc"}], "d": None}
    assert differences({"a": [{"b": 2.5, "c": f"a{ANY}"}]}, found) == []
    wrong = ({"e": 1}, {"a": []} | {"d": 0}, {"a": [{"b": "1"}]}, {"a": [{"c": "abd"}]}, {"a": [{}, {}]}, {"a": {}})
    assert all(differences(shown, found) for shown in wrong)
    assert wrong_lines('data: {"a": 1}\ndata: [DONE]', 'data: {"a": 2}\n\ndata: {}\n\n')
    assert not wrong_lines('data: {"a": 1}\ndata: [DONE]', 'data: {"a": 2}\n\ndata: {}\n\ndata: [DONE]\n\n')
