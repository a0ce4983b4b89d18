"""Requests of clients, in every API, and their answers without what differs from one run to the next."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]

PARTS = ("text", "content", "reasoning_content", "arguments", "partial_json", "thinking", "delta")  # of one text
# What names an answer, tells its times, or counts what happened to be cached.
DIFFERS = {
    "id", "call_id", "item_id", "created", "created_at", "completed_at", "timings", "system_fingerprint",
    "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens",
}  # fmt: skip
RETRY_S = 0.1
FULL = (429, 529)
MAX_TRIES = 600  # of a client that is told to come back


@dataclass(frozen=True)
class ClientRequest:
    """What a client sends. `fold` makes one answer of the events of a stream."""

    name: str
    path: str
    body: Json
    fold: Callable[[list[Json]], Json] | None = None  # None: the answer is no stream

    def __str__(self) -> str:
        return self.name


@dataclass
class ClientAnswer:
    """What came of a request. It fills as it comes."""

    status: int = 0
    body: Json | None = None
    events: list[Json] = field(default_factory=list)
    was_cut: bool = False  # the connection ended before the answer did
    leaves: bool = False  # after the first part

    @property
    def error(self) -> Json | None:
        """Of the answer, or the event of a stream."""
        found = [*self.events, self.body or {}]
        return next((one for one in found if "error" in one and one["error"] is not None), None)


def merged(before: Any, after: Any, key: str = "") -> Any:
    """Parts of an answer, put together."""
    if before is None or after is None:
        return after if before is None else before
    if isinstance(before, dict):
        names = [*before, *(name for name in after if name not in before)]
        return {name: merged(before.get(name), after.get(name), name) for name in names}
    if isinstance(before, list):
        if not all(isinstance(one, dict) and "index" in one for one in (*before, *after)):
            return before + after
        by_index: dict[int, Any] = {}
        for one in (*before, *after):
            by_index[one["index"]] = merged(by_index.get(one["index"]), one)
        return [by_index[index] for index in sorted(by_index)]
    return before + after if isinstance(before, str) and key in PARTS else after


def fold_openai(events: list[Json]) -> Json:
    found: Json = {}
    for event in events:
        found = merged(found, event)
    return found


def fold_anthropic(events: list[Json]) -> Json:
    found: Json = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            found = merged(found, {**event["message"], "content": None})
        elif kind == "content_block_start":
            found = merged(found, {"content": [{"index": event["index"], **event["content_block"]}]})
        elif kind == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            found = merged(found, {"content": [{"index": event["index"], **delta}]})
        elif kind == "message_delta":
            found = merged(found, {**event["delta"], "usage": event.get("usage")})
    assert events[-1]["type"] == "message_stop", events[-1]
    return found


def fold_responses(events: list[Json]) -> Json:
    last: Json = events[-1]["response"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    texts = [part["text"] for item in last["output"] for part in item.get("content") or () if "text" in part]
    assert said == "".join(texts), "what was streamed is not what is answered"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return last


def fold_tgi(events: list[Json]) -> Json:
    tokens, top = ([event.get(name) for event in events] for name in ("token", "top_tokens"))
    return {**events[-1], "token": tokens, "top_tokens": top}


def comparable(found: Any) -> Any:
    if isinstance(found, dict):
        if "cache_read_input_tokens" in found:  # which input_tokens are without
            found = found | {"input_tokens": found["input_tokens"] + (found["cache_read_input_tokens"] or 0)}
        return {name: comparable(value) for name, value in found.items() if name not in DIFFERS}
    return [comparable(one) for one in found] if isinstance(found, list) else found


class Clients:
    """Sends requests to a server. `keys`: each request has one of them."""

    def __init__(self, url: str, keys: Sequence[str] = ()) -> None:
        self._url = url
        self._keys = keys

    async def ask(self, client: httpx.AsyncClient, request: ClientRequest, number: int, answer: ClientAnswer) -> None:
        """Ask, again and again where the server is full, and listen to the end of the answer."""
        headers = {"authorization": f"Bearer {self._keys[number % len(self._keys)]}"} if self._keys else {}
        try:
            for _ in range(MAX_TRIES):
                async with client.stream(
                    "POST", self._url + request.path, json=request.body, headers=headers
                ) as response:
                    answer.status = response.status_code
                    if response.status_code in FULL:
                        await response.aread()
                        await asyncio.sleep(RETRY_S)
                        continue
                    if request.fold is None or response.status_code != 200:
                        answer.body = await _json(response)
                        break
                    async for event in _events(response):
                        answer.events.append(event)
                        if answer.leaves:
                            return
                    break
            while answer.body is not None and answer.body.get("status") in ("queued", "in_progress"):
                await asyncio.sleep(RETRY_S)
                polled = await client.get(f"{self._url}{request.path}/{answer.body['id']}", headers=headers)
                answer.status, answer.body = polled.status_code, polled.json()
        except httpx.TransportError:
            answer.was_cut = True


async def _json(response: httpx.Response) -> Json:
    content = await response.aread()
    if response.headers["content-type"].startswith("text/plain"):  # a part of its body came too late for any API
        return {"error": content.decode()}
    found: Json = json.loads(content)
    return found


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": TOOL["parameters"]}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}, "required": ["ok", "n"]}
ADAPTERS = ("first", "second", "third")
USER = [{"role": "user", "content": "Tell me more."}]
SYSTEM = [{"role": "system", "content": "Be kind."}, *USER]


def _chat(name: str, **fields: Any) -> ClientRequest:
    body = {"messages": SYSTEM, "max_tokens": 20, "temperature": 0, "seed": 1} | fields
    return ClientRequest(f"chat: {name}", "/v1/chat/completions", body, fold_openai if fields.get("stream") else None)


def _completion(name: str, **fields: Any) -> ClientRequest:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "seed": 2} | fields
    return ClientRequest(f"completion: {name}", "/v1/completions", body, fold_openai if fields.get("stream") else None)


def _messages(name: str, **fields: Any) -> ClientRequest:
    body = {"model": "tiny", "messages": USER, "system": "Be kind.", "max_tokens": 20, "temperature": 0} | fields
    return ClientRequest(f"messages: {name}", "/v1/messages", body, fold_anthropic if fields.get("stream") else None)


def _response(name: str, **fields: Any) -> ClientRequest:
    body = {"input": "Tell me more.", "max_output_tokens": 20, "temperature": 0} | fields
    return ClientRequest(f"response: {name}", "/v1/responses", body, fold_responses if fields.get("stream") else None)


def _generate(name: str, path: str = "/generate", **parameters: Any) -> ClientRequest:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 20, "details": True} | parameters}
    return ClientRequest(f"generate: {name}", path, body, fold_tgi if path == "/generate_stream" else None)


REQUESTS = (
    _chat("plain"),
    _chat("sampled, several, streamed", stream=True, n=3, temperature=1.0, top_p=0.9, stop=["e"],
          stream_options={"include_usage": True}),
    _chat("tools", tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
    _chat("tools, streamed", stream=True, tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
    _chat("schema, streamed", stream=True, temperature=0.7,
          response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}),
    _chat("log-probabilities, timings", logprobs=True, top_logprobs=2, timings=True),
    _chat("penalties and biases", frequency_penalty=1.0, repetition_penalty=1.2, logit_bias={"70": 2.0}, min_tokens=4),
    _completion("log-probabilities of the prompt", echo=True, logprobs=2),
    _completion("several prompts", prompt=["Once", "Twice", "Once upon"], n=2, temperature=1.0),
    _completion("token ids, streamed", stream=True, return_token_ids=True, priority=3, ignore_eos=True),
    _completion("choices", guided_choice=["yes", "no"]),
    _chat("an adapter, timings", model="first", timings=True),
    _chat("an adapter, schema", model="second", response_format={"type": "json_object"}),
    _completion("an adapter, streamed", model="second", stream=True, temperature=1.0),
    _completion("another adapter", model="third", prompt=["Once", "Twice"], timings=True, echo=True, logprobs=1),
    _completion("long, streamed", stream=True, max_tokens=64, temperature=1.0, ignore_eos=True),
    _messages("stop sequences, streamed", stream=True, stop_sequences=["o"], temperature=0),
    _messages("tools", tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}),
    _messages("tools, streamed", stream=True, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}),
    _response("plain"),
    _response("streamed", stream=True),
    _response("in the background", background=True),
    _response("schema", text={"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}),
    _generate("details", decoder_input_details=True, top_n_tokens=2),
    _generate("best of", best_of=2, do_sample=True, seed=3, temperature=0.9),
    _generate("streamed", path="/generate_stream", do_sample=True, seed=4, top_n_tokens=2, stop=["zz"]),
    _generate("grammar", grammar={"type": "regex", "value": "[0-9]{3}-[ab]{2}"}),
)  # fmt: skip
