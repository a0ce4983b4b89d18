"""POST /tokenize and /chat_tokenize; POST /detokenize."""

from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.body import read_body
from quire.server.openai.chat import encode_chat
from quire.server.openai.reply import ignored_header
from quire.server.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.openai.tool_use import tool_use
from quire.server.prompts import beside, encode_conversation
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
    add_special_tokens: bool | None = None  # around a prompt; templates write their own


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service, request: Request) -> Response:
    """With `inputs` as text-generation-inference has it, with `prompt` or `messages` as OpenAI-compatible servers."""
    raw = parse_json(await read_body(service, request))
    strict = service.settings.strict
    if "inputs" in raw:
        fields, unknown = typed(raw, TokenizeRequest, {}, strict=strict)
        add_special = fields.add_special_tokens is not False
        return _json(await _spans(service, fields.inputs, add_special), unknown)
    asked, unknown = typed(raw, PromptTokenizeRequest, {}, strict=strict)
    service.model.check_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("body must have one of inputs, prompt and messages, and not two of them")
    if asked.prompt is not None:
        add_special = asked.add_special_tokens is not False
        text, tokenizer = asked.prompt, service.model.tokenizer
        tokens = await beside(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special))
    else:
        add_prompt = asked.add_generation_prompt is not False
        _, tokens = await encode_conversation(service.model, asked.messages or (), add_generation_prompt=add_prompt)
    return _json({"count": len(tokens), "max_model_len": service.model.max_total_tokens, "tokens": tokens}, unknown)


async def chat_tokenize(service: Service, request: Request) -> Response:
    raw = parse_json(await read_body(service, request))
    fields, unknown = typed(raw, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    service.model.check_name(fields.model)
    text, _ = await encode_chat(service.model, fields, tool_use(fields, service.model))
    spans = await _spans(service, text, add_special=False)
    return _json({"tokenize_response": spans, "templated_text": text}, unknown)


async def detokenize(service: Service, request: Request) -> Response:
    raw = parse_json(await read_body(service, request))
    fields, unknown = typed(raw, DetokenizeRequest, {}, strict=service.settings.strict)
    service.model.check_name(fields.model)
    tokenizer = service.model.tokenizer
    text = await beside(len(fields.tokens), lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False))
    return _json({"prompt": text}, unknown)


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


def _json(body: Any, unknown: list[str]) -> Response:
    return Response(msgspec.json.encode(body), 200, ignored_header(unknown), "application/json")
