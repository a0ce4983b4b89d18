"""No request keeps the event loop from the others."""

import time

import pytest

from quire.errors import InvalidRequest
from quire.server.http.body import parse_json
from quire.server.settings import ServerSettings
from quire.text.chat import ChatTemplate
from quire.text.json_text import MAX_VALUES
from tests import web
from tests.server.loop_time import MeasuredLoop
from tests.server.running import RunningServer
from tests.server.vocabulary import served_model
from tests.server.worst_bodies import INFER, MESSAGES, RESPONSES, worst_bodies

MAX_LOOP_S = 0.2  # of processor time, within which every other request is looked at
POST_ROUTES = {"/v1/completions", "/v1/chat/completions", *MESSAGES, *RESPONSES, "/", "/generate", "/generate_stream",
               "/invocations", "/tokenize", "/chat_tokenize", "/detokenize", "/vertex", INFER}  # fmt: skip


@pytest.fixture(scope="module")
def loop():
    return MeasuredLoop()


@pytest.fixture(scope="module")
def server(loop):
    one = RunningServer(loop_factory=lambda: loop, model=served_model(end_ids=(0,))).start()
    yield one
    one.stop()


def test_no_body_keeps_the_loop_from_other_requests(server, loop):
    """Every route is sent the longest bodies that are allowed, in the shapes that cost most."""
    room = ServerSettings().payload_limit
    longest: dict[tuple[str, str], float] = {}
    with web.Client(base_url=server.url) as client:
        client.get("/health")
        for route, shape, body in worst_bodies(room):
            assert len(body) <= room, (route, shape)
            loop.take_longest_s()
            status = client.post(route, content=body).status_code
            assert status in {200, 400, 404, 422}, (route, shape, status)
            assert client.get("/health").status_code == 200  # so that the loop has been through its sockets again
            longest[route, shape] = loop.take_longest_s()
    assert {route for route, _ in longest} == POST_ROUTES
    assert {at: took_s for at, took_s in longest.items() if took_s > MAX_LOOP_S} == {}


def test_a_loop_that_is_held_up_is_noticed(server, loop):
    def work() -> None:
        until_s = time.thread_time() + 2 * MAX_LOOP_S
        while time.thread_time() < until_s:
            pass

    with web.Client(base_url=server.url) as client:
        loop.take_longest_s()
        server.loop.call_soon_threadsafe(work)
        client.get("/health")
        client.get("/health")
    assert loop.take_longest_s() > MAX_LOOP_S


def test_a_body_of_too_many_values_is_refused():
    within = b'{"a":[' + b"[]," * (MAX_VALUES - 4) + b"0]}"  # the object, its field, the list and those in it
    assert len(parse_json(within)["a"]) == MAX_VALUES - 3
    for item in (b"[],", b'{"b":1},'):
        with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} objects, arrays and fields"):
            parse_json(b'{"a":[' + item * MAX_VALUES + b"0]}")


def test_a_value_that_is_not_json_is_named_by_its_place():
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match=r"^documents\[1\]\.a\[2\]: a complex is not JSON$"):
        template.render([{"role": "user", "content": "a"}], documents=[{}, {"a": [0, 0, 1j]}])
