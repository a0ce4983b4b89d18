"""Items of /v1/responses as the messages of a chat."""

import pytest

from quire.errors import InvalidRequest
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.responses.conversation import ItemConversation, Placed
from quire.server.api.responses.history import History, read_input
from quire.server.api.responses.items import ItemReader, sealed
from quire.server.api.responses.requests import ResponseRequest
from quire.server.api.responses.translation import chat_request
from quire.server.service.response_database import MAX_REFERRED_BYTES, Chain

NOTHING = History(Chain([]), {})


def messages(given, instructions=None, history=NOTHING, *, strict=False):
    items = read_input(given, history, ItemReader(strict=strict))
    return ItemConversation(instructions, [*history.before(), *items]).messages


def call(number: int, name: str = "f") -> dict:
    return {"type": "function_call", "call_id": f"call_{number}", "name": name, "arguments": f'{{"n":{number}}}'}


def result(number: int, output="done") -> dict:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def chat_call(number: int, name: str = "f") -> dict:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n":{number}}}'}}


def test_a_text_is_a_message_of_the_user_and_instructions_are_the_system_message():
    assert messages("hi") == [{"role": "user", "content": "hi"}]
    assert messages("hi", "be kind") == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_messages_are_read_in_every_form():
    given = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "3"}, {"type": "input_text", "text": "4"}]},
        {"role": "assistant", "content": "five"},
        {"role": "developer", "content": "six"},
    ]
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]
    assert messages(given) == [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "five"},
        {"role": "developer", "content": "six"},
    ]


def test_a_system_message_at_the_beginning_joins_the_instructions():
    given = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert messages(given, "be kind")[0] == {"role": "system", "content": "be kind\n\nbe short"}
    assert len(messages(given, "be kind")) == 2
    assert len(messages(given)) == 2


def test_thinking_text_and_calls_of_one_turn_are_one_message():
    turn = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "let me look", "annotations": [], "logprobs": []}]},
        call(1), call(2),
    ]  # fmt: skip
    ask = {"role": "user", "content": "go"}
    found = messages([ask, *turn, result(1), result(2, [{"type": "input_text", "text": "fine"}]), ask])
    assert found == [
        ask,
        {"role": "assistant", "content": "let me look", "reasoning_content": "hm",
         "tool_calls": [chat_call(1), chat_call(2)]},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "done"},
        {"role": "tool", "tool_call_id": "call_2", "name": "f", "content": "fine"},
        ask,
    ]  # fmt: skip


def test_two_turns_are_two_messages():
    think = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    say = {"role": "assistant", "content": "a"}
    found = messages([think, say, think, say, call(1), say])
    assert [sorted(message) for message in found] == [
        ["content", "reasoning_content", "role"],
        ["content", "reasoning_content", "role", "tool_calls"],
        ["content", "role"],
    ]


def test_calls_alone_have_no_content_and_thinking_alone_an_empty_one():
    assert messages([call(1)]) == [{"role": "assistant", "content": None, "tool_calls": [chat_call(1)]}]
    think = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert messages([think]) == [{"role": "assistant", "content": "", "reasoning_content": "in short"}]
    assert messages([{"type": "reasoning", "summary": []}, {"role": "user", "content": "a"}]) == [
        {"role": "user", "content": "a"}
    ]


def test_thinking_comes_back_from_sealed_content_of_this_server_alone():
    think = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed("hm — so")}
    assert messages([think])[0]["reasoning_content"] == "hm — so"
    for content in ("gAAAAABo", "quire:???", "quire:/w=="):
        with pytest.raises(InvalidRequest, match="which this server has not written") as refused:
            messages([{"role": "user", "content": "a"}, think | {"encrypted_content": content}])
        assert refused.value.param == "input[1].encrypted_content"


def test_custom_calls_are_calls_of_one_argument():
    given = [
        {"type": "custom_tool_call", "call_id": "call_1", "name": "run", "input": 'print("a")'},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "a"},
    ]
    called, answered = messages(given)
    assert called["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"input":"print(\\"a\\")"}'}
    assert answered["content"] == "a"


def test_a_reference_is_the_item_that_is_kept_and_a_conversation_comes_first():
    kept = b'{"type":"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"kept"}]}'
    history = History(Chain([kept]), {"msg_1": kept})
    reference = {"type": "item_reference", "id": "msg_1"}
    for given in (reference, {"id": "msg_1"}, {"id": "msg_1", "type": None}):
        found = messages([{"role": "user", "content": "a"}, given], history=history)
        assert [message["content"] for message in found] == ["kept", "a", "kept"]
    with pytest.raises(InvalidRequest) as refused:
        messages([reference])
    assert (refused.value.param, refused.value.status) == ("input[0].id", 404)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "tool", "content": "a"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 3}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": ["a"], "text": "a"}]}, "input[1].content[0].type"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[1].type"),
        ({"type": ["a"]}, "input[1].type"),
        ({"type": "function_call", "call_id": "a", "name": "f"}, "input[1].arguments"),
        (call(1) | {"namespace": "crm"}, "input[1].namespace"),
        (call(1) | {"caller": {"type": "program", "caller_id": "p"}}, "input[1].caller"),
        (result(1), "input[1].call_id"),
        ({"type": "reasoning", "summary": [{"type": "reasoning_text", "text": "a"}]}, "input[1].summary[0].type"),
    ],
)
def test_a_wrong_item_is_refused_with_its_place(item, param):
    with pytest.raises(InvalidRequest) as refused:
        messages([{"role": "user", "content": "a"}, item])
    assert refused.value.param == param


def test_unknown_keys_of_items_and_parts_are_named_or_refused():
    item = {"role": "user", "colour": "red", "content": [{"type": "input_text", "text": "a", "size": 3}]}
    reader = ItemReader(strict=False)
    read_input([item], NOTHING, reader)
    assert reader.unknown == ["input[0].colour", "input[0].content[].size"]
    with pytest.raises(InvalidRequest, match=r"input\[0\]\.colour is not a field"):
        messages([item], strict=True)
    del item["colour"]
    with pytest.raises(InvalidRequest, match=r"input\[0\]\.content\[\]\.size is not a field"):
        messages([item], strict=True)


@pytest.mark.parametrize("value", [[1], [[1]], ["a"], [{"a": 1}]])
@pytest.mark.parametrize("name", ["content", "output", "summary"])
@pytest.mark.parametrize("item", [call(1), {"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}])
def test_parts_in_a_field_that_an_item_does_not_have_are_not_looked_at(item, name, value):
    if name in item or (item.get("type"), name) == ("reasoning", "content"):
        return
    reader = ItemReader(strict=False)
    read_input([item | {name: value}], NOTHING, reader)
    assert reader.unknown == [f"input[0].{name}"]


def test_an_item_is_not_referred_to_any_number_of_times():
    text = "x" * (MAX_REFERRED_BYTES // 10)
    kept = b'{"type":"message","id":"a","role":"user","content":[{"type":"input_text","text":"%b"}]}' % text.encode()
    history = History(Chain([]), {"a": kept})
    assert len(messages([{"id": "a"}] * 9, history=history)) == 9
    with pytest.raises(InvalidRequest, match=f"the limit is {MAX_REFERRED_BYTES}") as refused:
        messages([{"id": "a"}] * 20_000, history=history)
    assert refused.value.param == "input[9].id"


def request(**fields) -> ChatRequest:
    return chat_request(ResponseRequest(input="a", **fields), [{"role": "user", "content": "a"}])


def test_tools_and_the_choice_of_them_have_the_form_of_chats():
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}
    found = request(tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    assert found.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert found.parallel_tool_calls is False
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert request(tool_choice=allowed).tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "f"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [3]}}, "tool_choice.tools[0].type"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        request(**fields)
    assert refused.value.param == param


def test_errors_of_chats_get_the_names_of_this_api():
    items = [{"type": "message", "role": "user", "content": []}, *map(call, (1, 2))]
    conversation = ItemConversation(
        "be kind", [Placed(f"input[{4 + number}]", item) for number, item in enumerate(items)]
    )
    for param, expected in {
        "messages[1].content[0].text": "input[4]",
        "messages[0].content": "instructions",
        "messages[2].content": "input[5]",
        "messages[2].tool_calls[1].function.arguments": "input[6].arguments",
        "messages[2].tool_calls[1]": "input[6]",
        "messages": "input",
        "tools[2].function.parameters": "tools[2].parameters",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "temperature": "temperature",
    }.items():
        assert conversation.own_name(param) == expected


@pytest.mark.parametrize(
    ("cut", "whole"), [("", "{}"), ("{", "{}"), ('{"n":1,"m":"tw', '{"n":1}'), ('{"n":1}', '{"n":1}')]
)
def test_the_arguments_of_a_call_that_was_cut_are_those_that_are_complete(cut, whole):
    begun = {**call(1), "arguments": cut}
    given = [{"role": "user", "content": "go"}, {**begun, "status": "incomplete"}, result(1, "not called: cut off")]
    (told,) = messages(given)[1]["tool_calls"]
    assert told["function"]["arguments"] == whole
    assert messages([{**begun, "status": "completed"}])[0]["tool_calls"][0]["function"]["arguments"] == cut
