"""The OpenAI routes through the openai client."""

import asyncio

import openai
import pytest

from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import END


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def ids(server: RunningServer, text: str) -> list[int]:
    return server.model.tokenizer.encode(text)


def test_the_model_is_listed(client, server):
    (model,) = client.models.list().data
    assert model.id == "fake"
    assert client.models.retrieve("fake").created == server.model.created
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_the_text_of_what_the_engine_samples(client, server):
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=20, temperature=0)
    assert answer.choices[0].text == server.expected_text(ids(server, "hello"), 20)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)


def test_a_streamed_completion_adds_up_to_the_whole(client, server):
    chunks = list(
        client.completions.create(
            model="fake",
            prompt="hello",
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == server.expected_text(ids(server, "hello"), 40)
    assert chunks[-1].usage.completion_tokens == 40
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len(chunks) > 10


def test_several_prompts_and_samples_come_back_in_order(client, server):
    prompts = ["abc", "xyz"]
    answer = client.completions.create(model="fake", prompt=prompts, max_tokens=6, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text == server.expected_text(ids(server, prompts[choice.index // 2]), 6)
    streamed = {}
    for chunk in client.completions.create(model="fake", prompt=prompts, max_tokens=6, temperature=0, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_prompts_may_be_tokens(client, server):
    one = client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=5, temperature=0)
    two = client.completions.create(model="fake", prompt=[[1, 2, 3], [4, 5]], max_tokens=5, temperature=0)
    assert one.choices[0].text == two.choices[0].text == server.expected_text([1, 2, 3], 5)
    assert two.choices[1].text == server.expected_text([4, 5], 5)


def test_a_stop_string_ends_the_text_and_the_work(client, server):
    whole = server.expected_text(ids(server, "stop here"), 60)
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    for stream in (False, True):
        answer = client.completions.create(
            model="fake", prompt="stop here", max_tokens=60, temperature=0, stop=[stop], stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            text, reason = "".join(choice.text for choice in chunks), chunks[-1].finish_reason
        else:
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert (text, reason) == (expected, "stop")
    server.wait_until(lambda: server.driver.engine.scheduler.num_requests == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_after_min_tokens(client, server, stream):
    tokens = server.expected(ids(server, "abc"), 40)
    stops = [*"abcdefghijklmno"]
    asked = {"model": "fake", "prompt": "abc", "max_tokens": 40, "temperature": 0, "stop": stops, "stream": stream}
    answer = client.completions.create(**asked, extra_body={"min_tokens": 20})
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    decode = server.model.tokenizer.decode
    end = next(number for number in range(20, 40) if decode(tokens[number : number + 1]) in stops)
    assert any(stop in decode(tokens[:20]) for stop in stops)
    assert "".join(choice.text for choice in choices) == decode(tokens[:end])
    assert choices[-1].finish_reason == "stop"


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(client, server):
    tokens = server.expected(ids(server, "abc"), 30)
    stop = tokens[10]
    answer = client.completions.create(
        model="fake", prompt="abc", max_tokens=30, temperature=0,
        extra_body={"stop_token_ids": [stop], "return_token_ids": True},
    )  # fmt: skip
    kept = tokens[: tokens.index(stop) + 1]
    assert answer.choices[0].token_ids == kept
    assert answer.choices[0].text == server.model.tokenizer.decode(kept[:-1])
    assert answer.choices[0].finish_reason == "stop"


def test_echo_with_logprobs_and_no_tokens_scores_the_prompt(client, server):
    """As evaluation harnesses ask for the likelihood of a text."""
    answer = client.completions.create(model="fake", prompt="score", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "score"
    assert logprobs.tokens == list("score")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs[0] is None
    assert all(score < 0 for score in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert answer.usage.completion_tokens == 0


def test_echo_repeats_the_prompt_before_the_answer_streamed_or_not(client):
    asked = {"model": "fake", "prompt": "abc", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert whole.text.startswith("abc")
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.logprobs.tokens] == whole.logprobs.tokens
    assert [t for chunk in chunks for t in chunk.logprobs.text_offset] == whole.logprobs.text_offset
    assert len(whole.logprobs.tokens) == 7


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["é a", "éé", [28, 29, 28, 1, 0, 28], [29]])
@pytest.mark.parametrize(
    "fields", [{}, {"skip_special_tokens": False}, {"stop": ["a", "b"]}, {"logit_bias": {"28": 40, "29": 40}}], ids=str
)
def test_offsets_count_characters_of_the_text_streamed_or_not(client, server, echo, prompt, fields):
    """Of é, which is the two tokens 28 and 29, both have its offset."""
    asked = {"model": "fake", "prompt": prompt, "max_tokens": 30, "seed": 4, "echo": echo, "logprobs": 0}
    asked["extra_body"] = fields
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    offsets = whole.logprobs.text_offset
    assert [t for chunk in chunks if chunk.logprobs for t in chunk.logprobs.text_offset] == offsets
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(whole.text)
    for token, offset in zip(whole.logprobs.tokens[:-1], offsets, strict=False):
        is_shown = token != END or (echo and offset < 5) or "skip_special_tokens" in fields
        if is_shown and not token.startswith("bytes:"):
            assert whole.text.startswith(token, offset)


def test_the_parts_of_a_character_share_its_offset(client):
    asked = {"model": "fake", "prompt": "éa é", "max_tokens": 0, "echo": True, "logprobs": 0}
    assert client.completions.create(**asked).choices[0].logprobs.text_offset == [0, 0, 1, 2, 3, 3]


def test_the_best_of_several_is_returned(client, server):
    asked = {"model": "fake", "prompt": "best", "max_tokens": 5, "seed": 3, "logprobs": 0}
    all_of_them = client.completions.create(**asked, n=4).choices
    best = client.completions.create(**asked, n=1, best_of=4).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) for choice in all_of_them}
    assert len(means) == 4
    assert [choice.text for choice in best] == [max(means, key=lambda text: means[text])]


MESSAGES = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
RENDERED = "system: be kind\nuser: hi\nassistant: "


def test_a_chat_is_rendered_and_answered(client, server):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=9, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == server.expected_text(ids(server, RENDERED), 9)
    assert answer.usage.prompt_tokens == len(RENDERED)


def test_a_streamed_chat_begins_with_the_role_and_adds_up(client, server):
    chunks = list(
        client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=30, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == server.expected_text(ids(server, RENDERED), 30)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs_come_for_each_token_streamed_or_not(client):
    asked = {"model": "fake", "messages": MESSAGES, "max_tokens": 6, "seed": 5, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked).choices[0]
    assert len(whole.logprobs.content) == 6
    assert "".join(entry.token for entry in whole.logprobs.content if entry.bytes and entry.bytes[0] < 128)
    assert all(len(entry.top_logprobs) == 1 for entry in whole.logprobs.content)
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert entries == whole.logprobs.content


def test_a_seed_gives_the_same_answer_and_none_gives_others(client):
    def ask(**fields):
        return (
            client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=12, **fields)
            .choices[0]
            .message.content
        )

    assert ask(seed=-7) == ask(seed=-7)
    assert len({ask() for _ in range(3)}) == 3


def test_a_repeated_prompt_is_found_in_the_cache(client):
    asked = {"model": "fake", "prompt": "a prompt of some length", "max_tokens": 1}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert usage.prompt_tokens_details.cached_tokens == 20  # whole pages of 4, and the last token is computed
    salted = client.completions.create(**asked, extra_body={"cache_salt": "other"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_many_asynchronous_streams_at_once_each_get_their_own(server):
    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        prompt = f"stream {chr(97 + number)}"
        stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=25, temperature=0, stream=True)
        return prompt, "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    for prompt, text in asyncio.run(run()):
        assert text == server.expected_text(ids(server, prompt), 25)


def test_errors_name_the_field_its_value_and_the_limit(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"
    assert "temperature is -1" in refused.value.message
    with pytest.raises(
        openai.BadRequestError, match="prompt is too long: it has 600 tokens; the limit is 512"
    ) as refused:
        client.completions.create(model="fake", prompt="a" * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist"):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"top_k": "many"}, "top_k"),
        ({"presence_penalty": 7}, "presence_penalty"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "regex", "value": "("}}, "response_format"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({"model": "other"}, "model"),
    ],
)
def test_param_is_the_path_of_the_field_that_is_wrong(server, changes, param):
    body = {"messages": [{"role": "user", "content": "a"}]} | changes
    refused = web.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert refused["param"] == param, refused


@pytest.mark.parametrize(("prompt", "param"), [([1, 500], "prompt"), ([[1], [2, 500]], "prompt[1]")])
def test_param_of_a_token_outside_the_vocabulary_is_its_prompt(server, prompt, param):
    refused = web.post(f"{server.url}/v1/completions", json={"prompt": prompt}).json()["error"]
    assert refused["param"] == param, refused


def test_param_is_null_where_no_field_is_wrong(server):
    refused = web.post(f"{server.url}/v1/chat/completions", content="[]").json()["error"]
    assert (refused["param"], refused["message"]) == (None, "body: a JSON array; it must be an object")
    refused = web.post(f"{server.url}/v1/chat/completions", content="{").json()["error"]
    assert refused["param"] is None, refused


@pytest.mark.parametrize(
    ("settings", "is_parsed"),
    [
        (ServerSettings(), False),
        (ServerSettings(parse_special_in_messages=True), True),
        (ServerSettings(tgi_strict=True), True),
    ],
)
def test_special_tokens_in_messages_are_plain_text_unless_the_server_is_told_otherwise(
    make_server, settings, is_parsed
):
    server = make_server(settings=settings)
    messages = [{"role": "user", "content": f"a{END}b"}]
    tokens = web.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    assert (0 in tokens) == is_parsed
    shown = web.post(f"{server.url}/chat_tokenize", json={"messages": messages}).json()
    assert [each["id"] for each in shown["tokenize_response"]] == tokens
    assert shown["templated_text"] == f"user: a{END}b\nassistant: "
    body = {"messages": messages, "max_tokens": 2, "return_token_ids": True}
    assert web.post(f"{server.url}/v1/chat/completions", json=body).json()["prompt_token_ids"] == tokens
    plain = web.post(f"{server.url}/tokenize", json={"prompt": f"a{END}b"}).json()["tokens"]
    assert plain == [1, 0, 2]
