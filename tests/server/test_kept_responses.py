"""Responses that are continued, read again and run in the background, through OpenAI's own client."""

import json
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from quire.server.api.responses.items import MAX_ID
from quire.server.service.response_database import MAX_ITEMS
from quire.server.settings import ServerSettings
from quire.text.tokenizer import Tokenizer
from tests import web
from tests.patience import WAIT_S
from tests.server.gate import Gate
from tests.server.response_clients import client_of, raw, wait_for
from tests.server.running import RunningServer
from tests.server.vocabulary import served_model


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return client_of(server)


def test_a_response_continues_another_and_its_instructions_are_not_carried_over(server, client):
    first = client.responses.create(
        model="fake", instructions="be kind", input="hi", max_output_tokens=3, temperature=0
    )
    then = client.responses.create(
        model="fake", input="go on", previous_response_id=first.id, max_output_tokens=3, temperature=0
    )
    text = f"user: hi\nassistant: {first.output_text}\nuser: go on\nassistant: "
    assert then.output_text == server.expected_text(server.model.tokenizer.encode(text), 3)
    assert then.previous_response_id == first.id
    *_, last = client.responses.create(
        model="fake", input="a", previous_response_id=then.id, max_output_tokens=3, temperature=0, stream=True
    )
    text += f"{then.output_text}\nuser: a\nassistant: "
    assert last.response.output_text == server.expected_text(server.model.tokenizer.encode(text), 3)


def test_a_kept_response_is_read_listed_and_deleted(client):
    items = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    found = client.responses.create(model="fake", input=items, max_output_tokens=3, metadata={"for": "test"})
    assert client.responses.retrieve(found.id).to_dict() == found.to_dict()
    listed = client.responses.input_items.list(found.id, limit=2, order="asc")
    assert [item.content[0].text for item in listed] == ["a", "b", "c"]  # the client reads on, page by page
    assert [item.content[0].text for item in client.responses.input_items.list(found.id)] == ["c", "b", "a"]
    client.responses.delete(found.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response with the id"):
            use(found.id)
    with pytest.raises(openai.BadRequestError, match="no response with this id is kept") as refused:
        client.responses.create(model="fake", input="a", previous_response_id=found.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_conversation_of_which_a_response_was_deleted_is_not_continued(client):
    first = client.responses.create(model="fake", input="a", max_output_tokens=2)
    second = client.responses.create(model="fake", input="b", previous_response_id=first.id, max_output_tokens=2)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=f"it continues {first.id}, which is not kept"):
        client.responses.create(model="fake", input="c", previous_response_id=second.id)


def test_an_item_is_referred_to_by_its_id(server, client):
    first = client.responses.create(model="fake", input="hi", max_output_tokens=3)
    given = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "a"}]
    then = client.responses.create(model="fake", input=given, max_output_tokens=3, temperature=0)
    text = f"assistant: {first.output_text}\nuser: a\nassistant: "
    assert then.output_text == server.expected_text(server.model.tokenizer.encode(text), 3)
    assert len(list(client.responses.input_items.list(then.id))) == 2


def test_a_response_that_is_not_to_be_stored_is_not(client):
    found = client.responses.create(model="fake", input="hi", max_output_tokens=2, store=False)
    assert found.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


@pytest.mark.parametrize("length", [10, 10_000])  # the longer is parsed in a thread
@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
def test_one_key_does_not_see_what_another_keeps(make_server, length, how):
    server = make_server(settings=ServerSettings(api_key="ada,bob"))
    ada, bob = client_of(server, "ada"), client_of(server, "bob")
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 2, "prompt_cache_key": "a" * length}
    found = ada.responses.create(**asked, **how)
    if "stream" in how:
        *_, last = found
        found = last.response
    found = wait_for(ada, server, found.id)
    assert ada.responses.retrieve(found.id).id == found.id
    for use in (
        lambda: bob.responses.retrieve(found.id),
        lambda: bob.responses.input_items.list(found.id),
        lambda: bob.responses.delete(found.id),
        lambda: bob.responses.cancel(found.id),
        lambda: bob.responses.create(model="fake", input=[{"type": "item_reference", "id": found.output[0].id}]),
    ):
        with pytest.raises(openai.NotFoundError):
            use()
    with pytest.raises(openai.BadRequestError, match="no response with this id is kept"):
        bob.responses.create(model="fake", input="a", previous_response_id=found.id)
    assert ada.responses.create(model="fake", input="a", previous_response_id=found.id, max_output_tokens=2).output


def test_a_server_that_keeps_nothing_says_so(make_server):
    server = make_server(settings=ServerSettings(max_stored_responses=0))
    found = raw(server).json()
    assert found["store"] is False
    assert web.get(f"{server.url}/v1/responses/{found['id']}").status_code == 404
    assert raw(server, previous_response_id=found["id"]).status_code == 400
    assert "--max-stored-responses" in raw(server, background=True).json()["error"]["message"]


def fields_of(size: int) -> dict:
    """A request with so much that is kept and repeated, and a short prompt."""
    return {"prompt_cache_key": "x" * size}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_kept_is_answered_and_says_so(make_server, stream):
    server = make_server(settings=ServerSettings(max_stored_bytes=10_000))
    answer = raw(server, stream=stream, **fields_of(20_000))
    assert answer.status_code == 200
    found = answer.json() if not stream else json.loads(answer.text.rpartition("data: ")[2])["response"]
    assert (found["store"], found["status"], found["usage"]["output_tokens"]) == (False, "incomplete", 4)
    assert len(found["output"]) == 1
    assert web.get(f"{server.url}/v1/responses/{found['id']}").status_code == 404
    assert raw(server, stream=False).json()["store"] is True


def test_a_full_file_system_stops_no_answer_and_is_over_when_there_is_room(make_server, tmp_path):
    server = make_server(settings=ServerSettings(response_store=str(tmp_path / "responses")))
    before = raw(server).json()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        found = raw(server, **fields_of(400_000)).json()
        assert (found["store"], found["status"]) == (False, "incomplete")
        refused = raw(server, background=True, **fields_of(400_000))
        assert refused.status_code == 503
        assert "the store of responses cannot be used" in refused.json()["error"]["message"]
        assert raw(server, previous_response_id=before["id"]).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = raw(server, **fields_of(400_000)).json()
    assert again["store"] is True
    assert web.get(f"{server.url}/v1/responses/{again['id']}").json() == again
    server.wait_until(lambda: not server.service.num_streams)


def test_a_request_has_a_limit_of_items_and_items_one_of_their_ids(server):
    for path in ("", "/input_tokens"):
        for items, message in (
            ([{"role": "user", "content": ""}] * (MAX_ITEMS + 1), f"input has {MAX_ITEMS + 1} items"),
            ([{"role": "user", "content": "", "id": "x" * (MAX_ID + 1)}], f"input[0].id has {MAX_ID + 1} characters"),
        ):
            refused = web.post(f"{server.url}/v1/responses{path}", json={"input": items})
            limit = MAX_ITEMS if len(items) > 1 else MAX_ID
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == f"{message}; the limit is {limit}"


def test_another_keys_ids_are_refused_in_the_words_for_ids_that_do_not_exist(make_server):
    server = make_server(settings=ServerSettings(api_key="ada,bob"))
    kept = client_of(server, "ada").responses.create(model="fake", input="hi", max_output_tokens=2)
    absent = "resp_" + "0" * (len(kept.id) - 5), "msg_" + "0" * (len(kept.output[0].id) - 4)

    def answers(response_id: str, item_id: str) -> list[tuple[int, str]]:
        url, headers = f"{server.url}/v1/responses", {"authorization": "Bearer bob"}
        body = {"input": "a", "max_output_tokens": 1}
        found = [
            web.get(f"{url}/{response_id}", headers=headers),
            web.get(f"{url}/{response_id}/input_items", headers=headers),
            web.post(f"{url}/{response_id}/cancel", headers=headers),
            web.post(url, json=body | {"previous_response_id": response_id}, headers=headers),
            web.post(url, json=body | {"input": [{"type": "item_reference", "id": item_id}]}, headers=headers),
        ]
        return [(one.status_code, one.text.replace(response_id, "ID").replace(item_id, "ID")) for one in found]

    assert answers(kept.id, kept.output[0].id) == answers(*absent)


@pytest.mark.parametrize("how", [{}, {"background": True}])
def test_isolated_keys_share_no_cached_prefix_of_a_kept_conversation(make_server, how):
    server = make_server(settings=ServerSettings(api_key="ada,bob", isolate_api_keys=True))
    asked = {"model": "fake", "max_output_tokens": 1, "temperature": 0}
    begun, cached = {}, {}
    for name in ("ada", "bob"):
        client = client_of(server, name)
        first = client.responses.create(input="a b " * 40, **asked)
        begun[name] = first.usage.input_tokens_details.cached_tokens
        then = client.responses.create(input="c", previous_response_id=first.id, **asked, **how)
        cached[name] = wait_for(client, server, then.id).usage.input_tokens_details.cached_tokens
    assert begun == {"ada": 0, "bob": 0}
    assert cached["ada"] == cached["bob"] > 0


def test_many_clients_keep_and_continue_at_once(client):
    def talk(number: int) -> int:
        previous = None
        for turn in range(3):
            found = client.responses.create(
                model="fake", input=f"{number % 3} {turn}", previous_response_id=previous, max_output_tokens=2
            )
            previous = found.id
        return found.usage.input_tokens

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(talk, range(16)))) == 16


# In the background


def test_a_response_in_the_background_is_read_when_it_is_done(server, client):
    begun = client.responses.create(model="fake", input="hi", max_output_tokens=6, temperature=0, background=True)
    assert (begun.status, begun.output, begun.usage, begun.background) == ("queued", [], None, True)
    found = wait_for(client, server, begun.id)
    whole = client.responses.create(model="fake", input="hi", max_output_tokens=6, temperature=0)
    assert (found.status, found.output_text) == ("incomplete", whole.output_text)
    assert found.usage.output_tokens == 6
    assert client.responses.cancel(begun.id).status == "incomplete"  # it is over, and stays as it is


@pytest.fixture
def held(make_server):
    """A server whose engine works only as long as a test lets it."""
    gate = threading.Event()
    server = make_server(before_result=lambda *_: gate.wait(WAIT_S), max_sequence_tokens=512)
    server.gate = gate
    yield server
    gate.set()


def test_a_response_in_the_background_can_be_cancelled(held):
    client = client_of(held)
    begun = client.responses.create(model="fake", input="hi", max_output_tokens=6, background=True)
    assert client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still in progress"):
        client.responses.create(model="fake", input="a", previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    held.wait_until(lambda: not held.service.num_streams)
    held.gate.set()
    assert client.responses.retrieve(begun.id).status == "cancelled"


def test_a_response_in_the_background_that_is_deleted_stops(held):
    client = client_of(held)
    begun = client.responses.create(model="fake", input="hi", max_output_tokens=6, background=True)
    client.responses.delete(begun.id)
    held.wait_until(lambda: not held.service.num_streams)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_a_response_that_another_process_cancels_stops(make_server, tmp_path):
    """Two servers share a file, as two HTTP workers do."""
    gate = threading.Event()
    settings = ServerSettings(response_store=str(tmp_path / "responses.sqlite"))
    try:
        one = make_server(settings=settings, before_result=lambda *_: gate.wait(WAIT_S))
        two = make_server(settings=settings)
        begun = client_of(one).responses.create(model="fake", input="hi", max_output_tokens=6, background=True)
        assert client_of(two).responses.retrieve(begun.id).status == "in_progress"
        assert client_of(two).responses.cancel(begun.id).status == "cancelled"
        one.wait_until(lambda: not one.service.num_streams)
        assert client_of(one).responses.retrieve(begun.id).status == "cancelled"
    finally:
        gate.set()


class FaultyTokenizer(Tokenizer):
    """Raises when an answer is written that shows the bytes of its tokens."""

    def token_bytes(self, token: int) -> bytes:
        raise ValueError("a defect")


def test_a_response_in_the_background_has_failed_as_soon_as_a_defect_ends_it(make_server):
    model = served_model()
    faulty = FaultyTokenizer(model.tokenizer._backend, model.tokenizer.special_tokens)
    server = make_server(model=replace(model, tokenizer=faulty))
    shows_bytes = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    begun = raw(server, background=True, **shows_bytes).json()
    client = client_of(server)
    found = wait_for(client, server, begun["id"])
    assert (found.status, found.error.code) == ("failed", "server_error")
    assert found.error.message == "an internal error; see the log"
    server.wait_until(lambda: not server.service.num_streams)
    assert raw(server, background=True).json()["status"] == "queued"


def test_a_response_that_does_not_run_in_the_background_is_not_cancelled(client):
    found = client.responses.create(model="fake", input="hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="does not run in the background"):
        client.responses.cancel(found.id)


def test_a_stream_that_its_client_leaves_is_not_kept(make_server):
    gate = Gate()
    server = make_server(before_result=gate)
    try:
        gate.let(3)
        client = client_of(server)
        with client.responses.create(model="fake", input="hi", max_output_tokens=400, stream=True) as stream:
            begun = next(iter(stream)).response
        gate.step_until(lambda: not server.service.num_streams)  # a write tells that it is gone
    finally:
        gate.open()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
