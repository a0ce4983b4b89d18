"""Bodies as long as a server takes them, each in a shape that is costly in its own way."""

import json
from collections.abc import Iterator
from typing import Any

from quire.text.json_text import MAX_VALUES

CHATS = ("/v1/chat/completions", "/invocations", "/chat_tokenize")
TEXTS = ("/v1/completions", "/invocations", "/tokenize")
INPUTS = ("/generate", "/generate_stream", "/", "/invocations", "/tokenize")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
RESPONSES = ("/v1/responses", "/v1/responses/input_tokens")
INFER = "/v2/models/fake/versions/1/infer"


def filled(body: dict[str, Any], path: tuple[str | int, ...], item: Any, num_bytes: int) -> bytes:
    """`body` with as many `item`s in the list at `path` as `num_bytes` and `MAX_VALUES` have room for."""
    place: Any = body
    for step in path:
        place = place[step]
    count = (num_bytes - len(_dumped(body))) // (len(_dumped(item)) + 1)
    if num_values(item):
        count = min(count, (MAX_VALUES - num_values(body)) // num_values(item))
    place.extend([item] * count)
    return _dumped(body)


def num_values(value: Any) -> int:
    """Objects, arrays and fields of objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_values, value.values()))
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 0


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}


def tool(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def many_keys(num_bytes: int, value: Any = 0) -> dict[str, Any]:
    """A few fewer than may be, each with a long name."""
    count = (MAX_VALUES - 100) // (1 + num_values(value))
    length = num_bytes // count - 10
    return {f"{number:x}".ljust(length, "k"): value for number in range(count)}


def chats(room: int) -> Iterator[tuple[str, bytes]]:
    """Conversations, and what stands beside them."""
    messages = ("messages",)
    yield "many empty messages", filled(chat(), messages, {"role": "user", "content": ""}, room)
    yield "many messages of no parts", filled(chat(), messages, {"role": "user", "content": []}, room)
    part = {"type": "text", "text": ""}
    of_parts = chat(messages=[{"role": "user", "content": [part]}])
    yield "many parts", filled(of_parts, ("messages", 0, "content"), part, room)
    refused = {"type": "refusal", "refusal": ""}
    of_refusals = chat(messages=[{"role": "assistant", "content": [refused]}])
    yield "many refusals", filled(of_refusals, ("messages", 0, "content"), refused, room)
    yield "a message of many keys", _dumped(chat(messages=[{"role": "user", "content": "a"} | many_keys(room - 1000)]))
    called = {"role": "assistant", "content": "", "tool_calls": []}
    yield "many calls", filled(chat(messages=[called]), ("messages", 0, "tool_calls"), call("{}"), room)
    long_call = call(json.dumps({"a": [0] * (room // 4)}))
    yield "a call of long arguments", _dumped(chat(messages=[{**called, "tool_calls": [long_call]}]))
    yield "a long message", _dumped(chat(messages=[{"role": "user", "content": "a " * (room // 2 - 50)}]))
    yield "many special tokens", _dumped(chat(messages=[{"role": "user", "content": "<|end|>" * (room // 8)}]))
    yield "nearly special tokens", _dumped(chat(messages=[{"role": "user", "content": "<|en" * (room // 5)}]))
    yield "many short documents", filled(chat(documents=[]), ("documents",), {"a": ""}, room)
    under_a_key = chat(documents=[{"k" * (room // 2): []}])
    yield "a long key over many values", filled(under_a_key, ("documents", 0, "k" * (room // 2)), 0, room)
    yield "many variables", _dumped(chat(chat_template_kwargs=many_keys(room - 1000)))
    yield "many tools", filled(chat(tools=[]), ("tools",), tool(), room)
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "a" * (room - 1000)}}}
    yield "a tool of a long schema", _dumped(chat(tools=[tool(parameters=schema)]))
    yield (
        "a tool of many properties",
        _dumped(chat(tools=[tool(parameters={"type": "object", "properties": many_keys(room - 1000, {})})])),
    )
    properties = {f"p{number}": {"type": "string"} for number in range(9000)}
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": properties}}}
    yield "an answer of a long schema", _dumped(chat(response_format=wanted))
    yield "a long expression", _dumped(chat(response_format={"type": "regex", "value": "(a|b)" * 50_000}))
    yield "a long choice", filled(chat(guided_choice=[]), ("guided_choice",), "a", room)
    yield "a long grammar", _dumped(chat(guided_grammar='root ::= "a"' + ' | "a"' * 10_000))
    yield "many rules", _dumped(chat(grammar="\n".join(f"r{number} ::= r{number + 1}" for number in range(4000))))
    yield "many bad words", filled(chat(bad_words=[]), ("bad_words",), "a", room)
    yield "long bad words", _dumped(chat(bad_words=["ab" * 499] * 128))
    yield "many allowed tokens", filled(chat(allowed_token_ids=[]), ("allowed_token_ids",), 1, room)
    yield "many unknown fields", _dumped(chat() | many_keys(room - 1000))
    yield "many biases", _dumped(chat(logit_bias=many_keys(room - 1000)))
    yield "many pairs of biases", filled(chat(logit_bias=[]), ("logit_bias",), [1, 1], room)
    yield "many stop strings", filled(chat(stop=[]), ("stop",), "a", room)
    yield "many tokens that end", filled(chat(stop_token_ids=[]), ("stop_token_ids",), 1, room)
    yield "many lists", filled(chat(documents=[{"a": []}]), ("documents", 0, "a"), [], room)
    yield "a long refused value", filled(chat(audio=[]), ("audio",), [], room)


def messages(room: int) -> Iterator[tuple[str, bytes]]:
    """Conversations with the blocks of the Anthropic API."""
    path = ("messages",)
    yield "many empty messages", filled(chat(), path, {"role": "user", "content": ""}, room)
    yield "many messages of one turn", filled(chat(), path, {"role": "user", "content": "a" * 60}, room)
    yield "many messages of no blocks", filled(chat(), path, {"role": "assistant", "content": []}, room)
    block = {"type": "text", "text": "a"}
    of_blocks = chat(messages=[{"role": "user", "content": [block]}])
    yield "many blocks", filled(of_blocks, ("messages", 0, "content"), block, room)
    yield "many system blocks", filled(chat(system=[]), ("system",), block, room)
    call = {"type": "tool_use", "id": "a", "name": "a", "input": {}}
    called = chat(messages=[{"role": "assistant", "content": []}])
    yield "many calls", filled(called, ("messages", 0, "content"), call, room)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    answered = chat(messages=[{"role": "assistant", "content": [call]}, {"role": "user", "content": []}])
    yield "many results", filled(answered, ("messages", 1, "content"), result, room)
    thought = {"type": "thinking", "thinking": "a", "signature": ""}
    yield "many thoughts", filled(called, ("messages", 0, "content"), thought, room)
    long_call = call | {"input": {"a": [0] * (room // 2 - 200)}}
    yield "a call of a long input", _dumped(chat(messages=[{"role": "assistant", "content": [long_call]}]))
    yield "a long message", _dumped(chat(messages=[{"role": "user", "content": "a " * (room // 2 - 50)}]))
    yield "many special tokens", _dumped(chat(system="<|end|>" * (room // 8)))
    yield "many tools", filled(chat(tools=[]), ("tools",), {"name": "a", "input_schema": {}}, room)
    examples = chat(tools=[{"name": "a", "input_schema": {}, "input_examples": []}])
    yield "a tool of many examples", filled(examples, ("tools", 0, "input_examples"), {}, room)
    yield "many unknown fields", _dumped(chat() | many_keys(room - 1000))
    of_keys = chat(messages=[{"role": "user", "content": [block | many_keys(room - 1000)]}])
    yield "a block of many unknown fields", _dumped(of_keys)
    yield "many stop sequences", filled(chat(stop_sequences=[]), ("stop_sequences",), "a", room)
    yield "a long refused value", filled(chat(mcp_servers=[]), ("mcp_servers",), [], room)


def responses(room: int) -> Iterator[tuple[str, bytes]]:
    """Conversations of items."""
    body: dict[str, Any] = {"input": [], "max_output_tokens": 1}
    path = ("input",)
    yield "many empty messages", filled(body | {"input": []}, path, {"role": "user", "content": ""}, room)
    part = {"type": "input_text", "text": ""}
    yield "many parts", filled(body | {"input": [{"role": "user", "content": []}]}, ("input", 0, "content"), part, room)
    call = {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"}
    yield "many calls", filled(body | {"input": []}, path, call, room)
    result = {"type": "function_call_output", "call_id": "a", "output": ""}
    yield "many results", filled(body | {"input": [call]}, path, result, room)
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    yield "many thoughts", filled(body | {"input": []}, path, thought, room)
    sealed = {"type": "reasoning", "encrypted_content": "quire:" + "YWFh" * (room // 4 - 100)}
    yield "long sealed thinking", _dumped(body | {"input": [sealed]})
    yield "many references", filled(body | {"input": []}, path, {"id": "a"}, room)
    unlike = [{"id": f"a{number}"} for number in range(20_000)]
    yield "many references to unlike items", _dumped(body | {"input": unlike})
    turns = [{"role": "user", "content": "a " * 400}] * (room // 850)
    yield "many turns to leave out", _dumped(body | {"input": turns, "truncation": "auto"})
    said = body | {"input": "a"}
    yield "a long input", _dumped(body | {"input": "a " * (room // 2 - 50)})
    yield "a long key that is repeated", _dumped(said | {"prompt_cache_key": "a" * (room - 100)})
    yield (
        "a long key that is repeated in events",
        _dumped(said | {"prompt_cache_key": "a" * (room - 100), "stream": True}),
    )
    yield "many tools", filled(said | {"tools": []}, ("tools",), {"type": "function", "name": "a"}, room)
    yield "many allowed tools", filled(
        said | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        ("tool_choice", "tools"), {"type": "function", "name": "a"}, room,
    )  # fmt: skip
    yield "much metadata", _dumped(said | {"metadata": many_keys(room - 1000, "")})
    yield "an item of many unknown fields", _dumped(body | {"input": [{"role": "user"} | many_keys(room - 1000)]})
    yield (
        "a part of many unknown fields",
        _dumped(body | {"input": [{"role": "user", "content": [part | many_keys(room - 1000)]}]}),
    )
    yield "many unknown fields", _dumped(said | many_keys(room - 1000))
    yield "a long refused value", filled(said | {"moderation": []}, ("moderation",), [], room)


def texts(room: int) -> Iterator[tuple[str, bytes]]:
    """Prompts, and token ids in their place."""
    yield "a long text", _dumped({"prompt": "a " * (room // 2 - 50), "max_tokens": 1})
    yield "many texts", filled({"prompt": [], "max_tokens": 1}, ("prompt",), "a", room)
    yield "as many texts as may be", _dumped({"prompt": ["a" * 400] * 256, "max_tokens": 1})
    yield "many token ids", filled({"prompt": [], "max_tokens": 1}, ("prompt",), 1, room)
    lists = {"prompt": [[1] * 500] * 256, "max_tokens": 1}
    yield "many lists of token ids", _dumped(lists)
    yield "as many sequences as may be", _dumped({"prompt": ["a" * 80] * 102, "n": 20, "max_tokens": 1})
    echoed = {"prompt": [[1] * 500] * 24, "max_tokens": 1, "echo": True, "logprobs": 20}
    yield "prompts to score", _dumped(echoed)
    yield "prompts to score in a stream", _dumped(echoed | {"stream": True})
    yield "one wrong token id", _dumped({"prompt": [[1] * 500] * 255 + [["a"] * (room // 4 - 70_000)], "max_tokens": 1})


def inputs(room: int) -> Iterator[tuple[str, bytes]]:
    yield "a long text", _dumped({"inputs": "a " * (room // 2 - 50), "parameters": {"max_new_tokens": 1}})
    yield "the end of a long text", _dumped({"inputs": "a " * (room // 2 - 50), "parameters": {"truncate": 9}})
    yield "many parameters", _dumped({"inputs": "a", "parameters": many_keys(room - 1000)})
    yield "many stop strings", filled({"inputs": "a", "parameters": {"stop": []}}, ("parameters", "stop"), "a", room)


def batches(room: int) -> Iterator[tuple[str, str, bytes]]:
    """Requests of several."""
    vertex: dict[str, Any] = {"instances": []}
    yield "/vertex", "many instances", filled(vertex, ("instances",), {"inputs": "a"}, room)
    each = {"messages": [{"role": "user", "content": ""}] * (room // 256 // 35), "max_tokens": 1}
    yield "/vertex", "instances of many messages", _dumped({"instances": [each] * 250})
    one = {"inputs": "a" * (room // 260), "parameters": {"truncate": 400, "max_new_tokens": 1}}
    yield "/vertex", "instances of long texts", _dumped({"instances": [one] * 250})
    an_input = {"name": "a", "shape": [1], "datatype": "BYTES", "data": [97]}
    infer = {"id": "a", "inputs": [], "outputs": []}
    yield INFER, "many inputs", filled(infer, ("inputs",), an_input, room)
    long_input = an_input | {"data": [97] * (room // 4 - 100)}
    yield INFER, "a long input", _dumped({"id": "a", "inputs": [long_input], "outputs": [{"name": "a"}]})
    as_many = [an_input | {"data": [97] * 400}] * 256
    long_stop = {"max_new_tokens": 1, "stop": ["a" * 1000] * 16}
    yield (
        INFER,
        "many inputs of long parameters",
        _dumped({"id": "a", "inputs": as_many, "outputs": [{"name": "a"}] * 256, "parameters": long_stop}),
    )
    yield "/detokenize", "many token ids", filled({"tokens": []}, ("tokens",), 1, room)


def worst_bodies(room: int) -> Iterator[tuple[str, str, bytes]]:
    """Routes, shapes and bodies of at most `room` bytes."""
    for routes, shapes in (
        (CHATS, chats),
        (MESSAGES, messages),
        (RESPONSES, responses),
        (TEXTS, texts),
        (INPUTS, inputs),
    ):
        of_each = [*shapes(room)]
        yield from ((routes[0], shape, body) for shape, body in of_each)
        # The others do the same with what they are sent, so a few shapes tell.
        yield from ((route, shape, body) for route in routes[1:] for shape, body in (of_each[0], of_each[-1]))
    yield from batches(room)


def _dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
