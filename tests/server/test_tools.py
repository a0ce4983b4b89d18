"""Calls of tools, through real clients. What the fake samples is random but for its mask."""

import json
import re
from collections.abc import Callable

import openai
import pytest
from huggingface_hub import InferenceClient

from quire.server.settings import ServerSettings
from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TOOL_TEMPLATE, served_model
from tests.text.templates import TEMPLATES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["rome", "oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "how is the weather in rome"}]


@pytest.fixture
def client(caller: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "weather":
        assert found["city"] in ("rome", "oslo")
        assert 1 <= found["days"] <= 5
    else:
        assert (name, found) == ("now", {})


def test_a_required_call_is_made(client):
    names = set()
    for seed in range(6):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, tools=[WEATHER, NOW], tool_choice="required", seed=seed, max_tokens=1000
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls) > 0
        for call in choice.message.tool_calls:
            assert call.type == "function"
            check(call.function.name, call.function.arguments)
            names.add(call.function.name)
    assert names == {"weather", "now"}


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "weather"}}, "weather"])
def test_a_named_call_is_made_once(client, choice):
    for seed in range(3):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, tools=[NOW, WEATHER], tool_choice=choice, seed=seed, n=2
        )
        for one in answer.choices:
            (call,) = one.message.tool_calls
            assert call.function.name == "weather"
            check("weather", call.function.arguments)


def test_calls_stream_as_deltas(client):
    for seed in range(4):
        asked = {"tools": [WEATHER, NOW], "tool_choice": "required", "seed": seed, "max_tokens": 1000}
        whole = client.chat.completions.create(model="fake", messages=ASK, **asked).choices[0]
        calls: dict[int, list[str]] = {}
        reasons = []
        for chunk in client.chat.completions.create(model="fake", messages=ASK, stream=True, **asked):
            (choice,) = chunk.choices
            reasons.append(choice.finish_reason)
            assert not choice.delta.content
            for call in choice.delta.tool_calls or []:
                if call.index not in calls:
                    assert call.id
                    assert call.type == "function"
                    calls[call.index] = [call.function.name, ""]
                else:
                    assert call.id is None
                    assert call.function.name is None
                calls[call.index][1] += call.function.arguments
        assert reasons[-1] == "tool_calls"
        assert set(reasons[:-1]) == {None}
        assert list(calls) == list(range(len(calls)))
        assert list(calls.values()) == [[c.function.name, c.function.arguments] for c in whole.message.tool_calls]


def test_the_clients_own_accumulation_of_a_stream_gives_the_call(client):
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(model="fake", messages=ASK, **asked) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    check(call.function.name, call.function.arguments)


def test_one_call_at_a_time_when_they_may_not_be_parallel(client):
    for seed in range(8):
        answer = client.chat.completions.create(
            model="fake",
            messages=ASK,
            tools=[WEATHER, NOW],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
        )
        assert len(answer.choices[0].message.tool_calls) == 1


def test_an_answer_may_be_text_when_the_model_decides(client):
    """What is sampled is as good as random, and calls are then most unlikely."""
    answer = client.chat.completions.create(model="fake", messages=ASK, tools=[WEATHER], max_tokens=30, seed=1)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model="fake", messages=ASK, tools=[WEATHER], max_tokens=30, seed=1, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


def test_a_call_that_is_cut_off_says_so(client):
    answer = client.chat.completions.create(
        model="fake", messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=60
    )
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"


def test_tools_and_calls_reach_the_template(caller):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome", "days": 1}'}}
    conversation = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    body = {"messages": conversation, "tools": [NOW], "tool_prompt": "call when you can."}
    text = web.post(f"{caller.url}/chat_tokenize", json=body).json()["templated_text"]
    assert '"name": "now"' in text
    assert "system: call when you can." in text
    assert "<tool_call>weather rometool: sunny" in text
    none = web.post(f"{caller.url}/chat_tokenize", json=body | {"tool_choice": "none", "tool_prompt": None}).json()
    assert "now" not in none["templated_text"]


def test_templates_without_tools_are_told_of_them_in_text(make_server: Callable[..., RunningServer]):
    server = make_server(model=served_model(end_ids=(0,), pieces=JSON_PIECES, max_total_tokens=4096))
    text = web.post(f"{server.url}/chat_tokenize", json={"messages": ASK, "tools": [NOW]}).json()["templated_text"]
    assert text.startswith("system: You can call functions.")
    assert '"name": "now"' in text


@pytest.mark.parametrize(
    ("template", "answer"),
    [("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'), ("llama3", '{"name": "now", "parameters": {}}')],
)
def test_models_write_calls_as_their_templates_do(make_server: Callable[..., RunningServer], template, answer):
    """One of Mistral's tokens is special. The client sees the same call in every format."""
    model = served_model(8192, end_ids=(0,), pieces=JSON_PIECES, template=TEMPLATES[template])
    server = make_server(model=model, max_sequence_tokens=8192, num_pages=9000)
    asked = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    reply = web.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": ASK, "return_token_ids": True, "max_tokens": 200, **asked},
    ).json()
    (choice,) = reply["choices"]
    said = model.tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=False)
    assert "".join(said.split()) == "".join(answer.split())  # blanks are the model's to choose
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "now"
    assert json.loads(call["function"]["arguments"]) == {}


def test_with_a_response_format_an_answer_is_a_call_or_follows_it(client):
    """As LangChain, pydantic-ai and openai-agents send it."""
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "Weather", "strict": True, "schema": schema}}
    kinds = set()
    for seed in range(12):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, tools=[WEATHER], response_format=described, seed=seed, max_tokens=1000
        )
        (choice,) = answer.choices
        kinds.add(choice.finish_reason)
        for call in choice.message.tool_calls or []:
            check(call.function.name, call.function.arguments)
        if not choice.message.tool_calls:
            assert json.loads(choice.message.content)["good"] in (True, False)
    assert kinds == {"tool_calls", "stop"}


def test_only_allowed_tools_are_called(client, caller):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, tools=[WEATHER, NOW], tool_choice=choice, seed=seed, max_tokens=1000
        )
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"now"}
    body = {"messages": ASK, "tools": [WEATHER, NOW], "tool_choice": choice}
    text = web.post(f"{caller.url}/chat_tokenize", json=body).json()["templated_text"]
    assert '"name": "weather"' in text  # the prompt has all tools, so that it is the same for any choice


SHELL = {"type": "custom", "custom": {"name": "shell", "description": "runs a command"}}
GATE = {
    "type": "custom",
    "custom": {
        "name": "gate",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(open|shut)-[1-3]"}},
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_are_called_with_an_input(client, stream):
    asked = {"tools": [GATE, SHELL], "tool_choice": {"type": "custom", "custom": {"name": "gate"}}, "seed": 4}
    if not stream:
        (call,) = client.chat.completions.create(model="fake", messages=ASK, **asked).choices[0].message.tool_calls
        assert (call.type, call.custom.name) == ("custom", "gate")
        assert re.fullmatch("(open|shut)-[1-3]", call.custom.input)
        return
    first, *rest = [
        call.model_dump(exclude_none=True)
        for chunk in client.chat.completions.create(model="fake", messages=ASK, stream=True, **asked)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert (first["type"], first["custom"]["name"], first["index"]) == ("custom", "gate", 0)
    assert re.fullmatch("(open|shut)-[1-3]", "".join(call["custom"]["input"] for call in rest))


def test_custom_tools_reach_the_template_as_functions_of_their_input(caller):
    call = {"id": "1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "a.txt"})
    body = {"messages": turns, "tools": [SHELL]}
    text = web.post(f"{caller.url}/chat_tokenize", json=body).json()["templated_text"]
    assert '"description": "runs a command"' in text
    assert "<tool_call>shell" in text
    assert "a.txt" in text


def test_without_grammars_only_what_they_are_needed_for_is_refused(make_server: Callable[..., RunningServer]):
    model = served_model(2048, end_ids=(0,), pieces=JSON_PIECES, template=TOOL_TEMPLATE)
    settings = ServerSettings(disable_grammar_support=True)
    url = make_server(settings=settings, model=model, max_sequence_tokens=2048, num_pages=6000).url
    for fields, status in (({}, 200), ({"tool_choice": "required"}, 400), ({"parallel_tool_calls": False}, 400)):
        body = {"messages": ASK, "tools": [NOW], "max_tokens": 20, **fields}
        assert web.post(f"{url}/v1/chat/completions", json=body).status_code == status


def test_hugging_faces_client_calls_tools(caller):
    hugging = InferenceClient(base_url=caller.url)
    answer = hugging.chat_completion(ASK, tools=[WEATHER], tool_choice="required", max_tokens=1000, seed=5)
    for call in answer.choices[0].message.tool_calls:
        check(call.function.name, call.function.arguments)
    named = hugging.chat_completion(
        ASK, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "now"}}, tool_prompt="go"
    )
    assert named.choices[0].message.tool_calls[0].function.name == "now"
    chunks = list(hugging.chat_completion(ASK, tools=[NOW, WEATHER], tool_choice="now", max_tokens=1000, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [{}]}, "tools[0].function is None"),
        ({"tools": [{"type": "web"}]}, "tools[0].type is 'web'"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom is None"),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "f",
                            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}},
                        },
                    }
                ]
            },
            "tools[0].custom.format.grammar.syntax is 'lark'",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools is []",
        ),
        ({"tools": [NOW, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name is 'a b'"),
        ({"tools": [NOW, NOW]}, "two functions of one name"),
        ({"tools": [NOW] * 129}, "number of tools"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters is []"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "nothing"}}}]}, "tools cannot be followed"),
        ({"tools": [{"function": {"name": "f", "parameters": {"pattern": "x{99999}"}}}]}, "parameters.pattern"),
        ({"tools": [NOW], "tool_choice": "other"}, "tool_choice is 'other'; the tools are now"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice is"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "there are no tools"),
        ({"tool_prompt": "go"}, "there are no tools"),
        ({"functions": [NOW]}, "see tools"),
    ],
)
def test_what_is_wrong_with_tools_is_named(caller, fields, why):
    refused = web.post(f"{caller.url}/v1/chat/completions", json={"messages": ASK} | fields)
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


def test_what_asks_for_no_tool_changes_nothing(client):
    plain = client.chat.completions.create(model="fake", messages=ASK, max_tokens=9, temperature=0)
    for fields in ({"tool_choice": "none", "tools": [NOW]}, {"tools": []}, {"parallel_tool_calls": True}):
        same = client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=9, temperature=0, extra_body=fields
        )
        assert same.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("route", "asked", "param"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
         "response_format"),
        ("chat/completions", {"guided_json": {"type": 1}}, "guided_json"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 1}}}]},
         "tools"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}}, "text.format"),
        ("responses", {"guided_regex": "(a"}, "guided_regex"),
    ],
)  # fmt: skip
def test_a_constraint_beside_tools_that_cannot_be_followed_is_named_itself(caller, route, asked, param):
    tool = {"type": "function", **WEATHER["function"]} if route == "responses" else WEATHER
    said = {"input": "a"} if route == "responses" else {"messages": ASK}
    refused = web.post(f"{caller.url}/v1/{route}", json={"tools": [tool], **said, **asked})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert refused.json()["error"]["message"].startswith(f"{param} cannot be followed")


def test_a_tool_is_strict_or_not(caller):
    function = {"type": "function", "function": {"name": "a", "strict": "yes"}}
    refused = web.post(f"{caller.url}/v1/chat/completions", json={"messages": ASK, "tools": [function]})
    assert refused.json()["error"]["param"] == "tools[0].function.strict"
