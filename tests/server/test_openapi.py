"""The documents say what the code does."""

import re
from html import escape
from pathlib import Path

import msgspec
import pytest

from quire.server.api.anthropic.requests import REFUSALS as MESSAGE_REFUSALS
from quire.server.api.anthropic.requests import MessagesRequest
from quire.server.api.openai.requests import CHAT_REFUSALS, COMPLETION_REFUSALS, ChatRequest, CompletionRequest
from quire.server.api.responses.requests import REFUSALS as RESPONSE_REFUSALS
from quire.server.api.responses.requests import ResponseRequest
from quire.server.api.tgi.requests import PARAMETER_REFUSALS, Parameters
from quire.server.http.routes import ROUTES, openapi_document
from quire.server.settings import ServerSettings
from tests import web

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def documented(*sections: str) -> dict[str, str]:
    """Fields and what becomes of them, out of the tables of the page's sections."""
    found: dict[str, str] = {}
    for section in sections:
        text = API.split(section, 1)[1].split("\n\n|", 1)[1]
        for row in text.split("\n\n", 1)[0].splitlines()[2:]:
            names, state = row.strip("|").split("|")[:2]
            for name in re.findall(r"`([^`]+)`", names):
                found[name.split(".")[0]] = state.strip().split(",")[0]
    return found


COMMON = "## Completions and chat completions"


@pytest.mark.parametrize(
    ("sections", "struct", "refusals"),
    [
        ((COMMON, "Completions also have"), CompletionRequest, COMPLETION_REFUSALS),
        ((COMMON, "\n\nand chat completions"), ChatRequest, CHAT_REFUSALS),
        (("## Responses",), ResponseRequest, RESPONSE_REFUSALS),
        (("## Anthropic's messages",), MessagesRequest, MESSAGE_REFUSALS),
        (("## /generate, /generate_stream, /",), Parameters, PARAMETER_REFUSALS),
    ],
)
def test_every_field_is_listed_as_it_is_treated(sections, struct, refusals):
    fields = dict.fromkeys(struct.__struct_fields__, "supported") | dict.fromkeys(refusals, "refused")
    assert documented(*sections) == fields


def test_every_route_is_listed():
    for path in {route.path for route in ROUTES if "{" not in route.path}:
        assert f"`{path}`" in API or f" {path}`" in API, path


def test_the_document_has_every_route_and_is_served(server):
    found = web.get(f"{server.url}/api-doc/openapi.json").json()
    assert found == msgspec.json.decode(msgspec.json.encode(openapi_document()))
    routes = {(route.path, route.method.lower()) for route in ROUTES}
    described = {(path, method) for path, methods in found["paths"].items() for method in methods}
    assert described == routes - {("/", "get"), ("/api-doc/openapi.json", "get"), ("/health_generate", "get")}
    fields = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(fields) == set(ChatRequest.__struct_fields__)


def parts_of(value, path=""):
    """All objects within a document, with their paths."""
    if isinstance(value, dict):
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from parts_of(child, f"{path}/{key}")


def test_generators_of_clients_find_all_that_they_need():
    """As openapi-python-client does, which leaves out what has no items, no id or no schema."""
    document = openapi_document()
    for path, part in parts_of(document):
        assert part.get("type") != "array" or "items" in part or "prefixItems" in part, path
        if isinstance(part.get("$ref"), str):
            assert part["$ref"].rsplit("/", 1)[1] in document["components"]["schemas"], path
        values = part.get("enum")
        if isinstance(values, list) and values:
            assert "type" in part or all(isinstance(value, str) for value in values), path
    titles = [schema.get("title", name) for name, schema in document["components"]["schemas"].items()]
    assert all(title.isidentifier() for title in titles), titles
    assert len(set(titles)) == len(titles), "two types of one name: give one of them another"
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("(get|post|delete)(_[a-z0-9]+)+", each) for each in ids), ids
    for operation in operations:
        described = operation["responses"]["200"].get("content", {"no content": {"schema": True}})
        assert described, operation["operationId"]
        assert all(content["schema"] for content in described.values()), operation["operationId"]


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda route: route.path)
def test_every_route_answers_its_own_example(server, route):
    path = route.path.replace("{model}", server.model.name).replace("{version}", "1")
    load, unload = (
        next(one for one in ROUTES if one.path == f"/v1/{name}_lora_adapter") for name in ("load", "unload")
    )
    if route is unload:  # there must be one
        web.post(server.url + load.path, content=load.example)
    answer = web.post(server.url + path, content=route.example)
    assert answer.status_code == 200, answer.text
    if route is load:  # other tests of this server list the models
        assert web.post(server.url + unload.path, content=unload.example).status_code == 200
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    assert is_stream or route.answer


def test_a_key_is_needed_where_the_table_says_so_and_where_no_route_is(make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    for route in ROUTES:
        path = route.path.replace("{model}", server.model.name).replace("{version}", "1")
        status = web.request(route.method, server.url + path, content=route.example).status_code
        assert (status == 401) is not route.is_open, route.path
    assert web.get(f"{server.url}/nowhere").status_code == 401
    assert web.post(f"{server.url}/health").status_code == 401  # no route takes it, so nothing says that it is open
    key = {"authorization": "Bearer secret"}
    assert web.get(f"{server.url}/nowhere", headers=key).status_code == 404
    assert web.post(f"{server.url}/health", headers=key).status_code == 405


def test_the_page_shows_every_route_and_field_and_needs_nothing_from_elsewhere(server):
    answer = web.get(f"{server.url}/docs")
    assert answer.headers["content-type"].startswith("text/html")
    for route in ROUTES:
        if route.is_documented:
            assert f"<code>{route.method} {route.path}</code>" in answer.text
            assert escape(route.example) in answer.text
    for field in ChatRequest.__struct_fields__:
        assert f"<code>{field}</code>" in answer.text
    assert "//" not in answer.text.replace("://", "//").replace("// ", "")  # no address of anything else
