"""POST /tokenize and /chat_tokenize; POST /detokenize; GET /tokenizer_info."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.api.chat import encode_chat
from quire.server.api.job import ignored_header
from quire.server.api.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.api.openai.tools import tool_use
from quire.server.api.sampling import at_most
from quire.server.api.tgi.requests import TokenizeRequest
from quire.server.api.tgi.responses import ChatTokenized, Detokenized, Tokenized, TokenSpan
from quire.server.api.validation import typed
from quire.server.http.body import read_json
from quire.server.service.served_model import ServedModel
from quire.server.service.service import Service
from quire.text.chat import DEFAULT
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer import TokenSpan as PlacedToken
from quire.text.tokenizer_files import tokenizer_config

MAX_SPANS = 262_144  # of a reply: each takes a hundred bytes


class PromptTokenizeRequest(msgspec.Struct, kw_only=True):
    """/tokenize as OpenAI-compatible servers have it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # around a prompt; templates write their own
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Encoded(NamedTuple):
    """An answer, and the names of unknown fields."""

    reply: list[TokenSpan] | Tokenized | ChatTokenized | Detokenized
    unknown: list[str]


async def tokenize(service: Service, request: Request) -> Response:
    """`inputs` follow text-generation-inference; `prompt` and `messages` follow OpenAI-compatible servers."""
    return await _answer(service, request, _tokenize)


async def chat_tokenize(service: Service, request: Request) -> Response:
    return await _answer(service, request, _chat_tokenize)


async def detokenize(service: Service, request: Request) -> Response:
    return await _answer(service, request, _detokenize)


async def tokenizer_info(service: Service, request: Request) -> Response:
    """The tokenizer and the chat template, by which clients count tokens and render conversations themselves."""
    return Response(await asyncio.to_thread(_tokenizer_info, service.model), media_type="application/json")


@cache
def _tokenizer_info(model: ServedModel) -> bytes:
    templates = model.templates
    info = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"))
    info |= tokenizer_config(model.tokenizer, model.max_total_tokens)
    if DEFAULT in templates.names:
        info["chat_template"] = templates.select(DEFAULT).source
    return msgspec.json.encode(info)


async def _answer(service: Service, request: Request, encode: Callable[[Service, dict[str, Any]], Encoded]) -> Response:
    body = await read_json(service, request)

    def write() -> tuple[bytes, list[str]]:
        encoded = encode(service, body.raw)
        return msgspec.json.encode(encoded.reply), encoded.unknown

    content, unknown = await service.offload.run(body.num_bytes, write)
    return Response(content, 200, ignored_header(unknown), "application/json")


def _tokenize(service: Service, raw: dict[str, Any]) -> Encoded:
    strict, model = service.settings.strict, service.model
    if "inputs" in raw:
        fields, unknown = typed(raw, TokenizeRequest, {}, strict=strict)
        add_special = fields.add_special_tokens is not False
        return Encoded(_spans(model.tokenizer, fields.inputs, add_special), unknown)
    body, unknown = typed(raw, PromptTokenizeRequest, {}, strict=strict)
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("body must have one of inputs, prompt and messages, and not two of them")
    if body.prompt is not None:
        tokens = model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = ChatRequest(
            messages=body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        _, tokens = encode_chat(service, chat, tool_use(chat, model))
    reply: Tokenized = {"count": len(tokens), "max_model_len": model.max_total_tokens, "tokens": tokens}
    if body.return_token_strs:
        reply["token_strs"] = [model.tokenizer.piece(token) for token in tokens]
    return Encoded(reply, unknown)


def _chat_tokenize(service: Service, raw: dict[str, Any]) -> Encoded:
    fields, unknown = typed(raw, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    service.model.check_name(fields.model)
    prompt, tokens = encode_chat(service, fields, tool_use(fields, service.model))
    at_most("the number of tokens", len(tokens), MAX_SPANS, param="messages")
    spans = _shown(prompt.text, service.model.tokenizer.encode_prompt_with_spans(prompt))
    return Encoded({"tokenize_response": spans, "templated_text": prompt.text}, unknown)


def _detokenize(service: Service, raw: dict[str, Any]) -> Encoded:
    fields, unknown = typed(raw, DetokenizeRequest, {}, strict=service.settings.strict)
    service.model.check_name(fields.model)
    text = service.model.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    return Encoded({"prompt": text}, unknown)


def _spans(tokenizer: Tokenizer, text: str, add_special: bool) -> list[TokenSpan]:
    if len(text) > MAX_SPANS // 4:  # it may have too many: counting tokens is cheaper than placing them
        num_tokens = len(tokenizer.encode(text, add_special_tokens=add_special))
        at_most("the number of tokens", num_tokens, MAX_SPANS, param="inputs")
    return _shown(text, tokenizer.encode_with_spans(text, add_special_tokens=add_special))


def _shown(text: str, found: list[PlacedToken]) -> list[TokenSpan]:
    """Tokens with their text and where it lies, in bytes."""
    offsets: Sequence[int] = range(len(text) + 1)
    if not text.isascii():
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
