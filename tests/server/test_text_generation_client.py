"""text-generation-inference's own client.

Its package asks for a huggingface_hub of years ago, which it does not need for this; `make` installs it without asking.
"""

import asyncio

import pytest

from quire.server.settings import ServerSettings
from tests.fake_executor import NAN
from tests.patience import WAIT_S
from tests.server.gate import Gate
from tests.server.vocabulary import PIECES, served_model

pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
text_generation = pytest.importorskip("text_generation")
errors = pytest.importorskip("text_generation.errors")
types = pytest.importorskip("text_generation.types")


@pytest.fixture
def client(server):
    return text_generation.Client(server.url, timeout=WAIT_S)


def ids(server, text: str) -> list[int]:
    return server.model.tokenizer.encode(text)


def test_it_generates_with_details(client, server):
    answer = client.generate("hello", max_new_tokens=8, decoder_input_details=True, top_n_tokens=1)
    expected = server.expected(ids(server, "hello"), 8)
    assert answer.generated_text == server.expected_text(ids(server, "hello"), 8)
    assert answer.details.finish_reason == types.FinishReason.Length
    assert [token.id for token in answer.details.tokens] == expected
    assert [token.id for token in answer.details.prefill] == ids(server, "hello")
    assert [len(tokens) for tokens in answer.details.top_tokens] == [1] * 8


def test_it_samples_several_and_gets_the_best(client):
    answer = client.generate("hello", do_sample=True, best_of=3, max_new_tokens=5, temperature=0.9, top_p=0.9, top_k=20)
    assert len(answer.details.best_of_sequences) == 2
    assert answer.details.seed is not None


@pytest.mark.parametrize("strict", [False, True])
def test_it_streams(make_server, strict):
    server = make_server(settings=ServerSettings(tgi_strict=strict), model=served_model(end_ids=(0,)))
    client = text_generation.Client(server.url, timeout=WAIT_S)
    whole = client.generate("hello", max_new_tokens=12)
    parts = list(client.generate_stream("hello", max_new_tokens=12))
    assert [part.token.id for part in parts] == [token.id for token in whole.details.tokens]
    assert parts[-1].generated_text == whole.generated_text
    assert parts[-1].details.finish_reason == whole.details.finish_reason


def test_it_stops_where_told(client, server):
    text = server.expected_text(ids(server, "stop"), 30)
    answer = client.generate("stop", max_new_tokens=30, stop_sequences=[text[10:13]])
    assert answer.details.finish_reason == types.FinishReason.StopSequence
    assert answer.generated_text == text[: text.index(text[10:13]) + 3]


def test_it_chats(client, server):
    messages = [types.Message(role="user", content="hi")]
    answer = client.chat(messages, max_tokens=6, temperature=0.0)
    assert answer.choices[0].message.content == server.expected_text(ids(server, "user: hi\nassistant: "), 6)
    assert answer.usage["completion_tokens"] == 6


@pytest.mark.parametrize("strict", [False, True])
def test_it_knows_the_errors(make_server, strict):
    server = make_server(settings=ServerSettings(tgi_strict=strict))
    client = text_generation.Client(server.url, timeout=WAIT_S)
    with pytest.raises(errors.ValidationError, match="max_new_tokens"):
        client.generate("hello", max_new_tokens=100_000)
    with pytest.raises(errors.ValidationError, match="max_new_tokens"):
        list(client.generate_stream("hello", max_new_tokens=100_000))
    with pytest.raises(errors.GenerationError):
        client.generate(f"a{PIECES[NAN]}b")
    with pytest.raises(errors.GenerationError):
        list(client.generate_stream(f"a{PIECES[NAN]}b"))


def test_it_is_told_of_overload(make_server):
    gate = Gate()
    server = make_server(settings=ServerSettings(max_concurrent_requests=1), before_result=gate)
    client = text_generation.Client(server.url, timeout=WAIT_S)
    try:
        gate.let(3)
        first = client.generate_stream("hello", max_new_tokens=300)
        next(first)
        with pytest.raises(errors.OverloadedError):
            client.generate("hello")
        first.close()
    finally:
        gate.open()


def test_it_works_side_by_side(server):
    client = text_generation.AsyncClient(server.url, timeout=WAIT_S)

    async def ask() -> list[str]:
        answers = await asyncio.gather(*(client.generate(prompt, max_new_tokens=5) for prompt in ("abc", "def", "ghi")))
        return [answer.generated_text for answer in answers]

    expected = [server.expected_text(ids(server, prompt), 5) for prompt in ("abc", "def", "ghi")]
    assert asyncio.run(ask()) == expected
