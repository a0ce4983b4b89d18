"""text-generation, text-generation-inference's own client."""

import asyncio

import pytest

text_generation = pytest.importorskip("text_generation")
errors = pytest.importorskip("text_generation.errors")
types = pytest.importorskip("text_generation.types")


@pytest.fixture(scope="module")
def headers(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def client(url, headers):
    return text_generation.Client(url, headers=headers, timeout=100)


def test_it_generates_with_details(client):
    answer = client.generate("One, two,", max_new_tokens=6, decoder_input_details=True, top_n_tokens=1)
    assert answer.details.generated_tokens == 6
    assert answer.details.finish_reason == types.FinishReason.Length
    assert len(answer.details.prefill) > 1


def test_it_generates_the_best_of_several(client):
    answer = client.generate("hello", do_sample=True, best_of=2, max_new_tokens=5, temperature=0.9, top_p=0.9, top_k=20)
    assert len(answer.details.best_of_sequences) == 1


def test_it_streams(client):
    whole = client.generate("One, two,", max_new_tokens=6)
    parts = list(client.generate_stream("One, two,", max_new_tokens=6))
    assert parts[-1].generated_text == whole.generated_text


def test_it_generates_by_a_grammar(client):
    grammar = types.Grammar(type=types.GrammarType.Regex, value="[a-c]{4}")
    assert len(client.generate("Letters:", grammar=grammar, max_new_tokens=20).generated_text) == 4


def test_it_chats(client):
    messages = [types.Message(role="user", content="hi")]
    assert client.chat(messages, max_tokens=6, temperature=0.5, seed=1).choices[0].message.content


@pytest.mark.xfail(
    raises=AttributeError,
    strict=True,
    reason="the client's own class for a part of a chat requires `tool_calls` in every part, also in those of text",
)
def test_it_streams_a_chat(client):
    messages = [types.Message(role="user", content="hi")]
    parts = list(client.chat(messages, max_tokens=6, stream=True))
    assert parts[-1].choices[0].finish_reason == "length"


def test_it_works_side_by_side(url, headers):
    client = text_generation.AsyncClient(url, headers=headers, timeout=100)

    async def ask() -> list:
        return await asyncio.gather(*(client.generate(prompt, max_new_tokens=4) for prompt in ("abc", "def", "ghi")))

    assert len(asyncio.run(ask())) == 3


def test_errors_have_the_clients_types(client, too_long):
    with pytest.raises(errors.ValidationError):
        client.generate(too_long, max_new_tokens=4)
