"""POST /tokenize and /chat_tokenize; POST /detokenize."""

from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.body import read_body
from quire.server.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.openai.tool_use import tool_use
from quire.server.prompts import beside, encode_conversation, encode_texts
from quire.server.service import Service
from quire.server.tgi.requests import TokenizeRequest
from quire.server.validation import parse_json, typed
from quire.text.tokenizer import Tokenizer


class PromptTokenizeRequest(msgspec.Struct, kw_only=True):
    """/tokenize as OpenAI-compatible servers have it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service, request: Request) -> Response:
    """With `inputs` as text-generation-inference has it, with `prompt` or `messages` as OpenAI-compatible servers."""
    raw = parse_json(await read_body(service, request))
    strict = service.settings.strict
    if "inputs" in raw:
        fields, _ = typed(raw, TokenizeRequest, {}, strict=strict)
        add_special = fields.add_special_tokens is not False
        return _json(await _spans(service, fields.inputs, add_special))
    asked, _ = typed(raw, PromptTokenizeRequest, {}, strict=strict)
    if asked.prompt is not None:
        (tokens,) = await encode_texts(service.model, [asked.prompt])
    elif asked.messages is not None:
        add_prompt = asked.add_generation_prompt is not False
        _, tokens = await encode_conversation(service.model, asked.messages, add_generation_prompt=add_prompt)
    else:
        raise InvalidRequest("body has none of inputs, prompt and messages; it must have one")
    return _json({"count": len(tokens), "max_model_len": service.model.max_total_tokens, "tokens": tokens})


async def chat_tokenize(service: Service, request: Request) -> Response:
    raw = parse_json(await read_body(service, request))
    fields, _ = typed(raw, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    tools = tool_use(fields, service.model)
    text, _ = await encode_conversation(
        service.model,
        fields.messages if tools is None else tools.conversation(fields.messages, fields.tool_prompt),
        tools=None if tools is None or tools.is_told else tools.rendered,
    )
    return _json({"tokenize_response": await _spans(service, text, add_special=False), "templated_text": text})


async def detokenize(service: Service, request: Request) -> Response:
    fields, _ = typed(
        parse_json(await read_body(service, request)), DetokenizeRequest, {}, strict=service.settings.strict
    )
    tokenizer = service.model.tokenizer
    text = await beside(len(fields.tokens), lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False))
    return _json({"prompt": text})


async def _spans(service: Service, text: str, add_special: bool) -> list[dict[str, Any]]:
    return await beside(len(text), lambda: spans(service.model.tokenizer, text, add_special))


def spans(tokenizer: Tokenizer, text: str, add_special: bool) -> list[dict[str, Any]]:
    """Tokens with their text and where it lies, in bytes."""
    found = tokenizer.encode_with_spans(text, add_special_tokens=add_special)
    offsets = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        {
            "id": span.id,
            "text": text[span.start : span.stop] or span.piece,
            "start": offsets[span.start],
            "stop": offsets[span.stop],
        }
        for span in found
    ]


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
