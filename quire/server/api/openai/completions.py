"""POST /v1/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import invalid, shown
from quire.request import MAX_LOGPROBS
from quire.server.api.grammars import with_grammar
from quire.server.api.job import Job, answer
from quire.server.api.openai.completion_encoder import CompletionEncoder
from quire.server.api.openai.constraints import constraint_of
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.requests import COMPLETION_REFUSALS, CompletionRequest
from quire.server.api.openai.spec_builder import SpecBuilder
from quire.server.api.sampling import at_most, between
from quire.server.api.validation import typed, whole
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service


async def completions(service: Service, request: Request) -> Response:
    return await answer_completion(service, request, await read_json(service, request), request.scope["route"].dialect)


async def answer_completion(service: Service, request: Request, body: Body, dialect: OpenAIDialect) -> Response:
    streams = body.raw.get("stream") is True
    return await answer(service, request, body, _parse, dialect, name="completions", streams=streams)


def _parse(service: Service, dialect: OpenAIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    settings, model = service.settings, service.model
    fields, unknown = typed(raw, CompletionRequest, COMPLETION_REFUSALS, strict=settings.strict)
    fields, unread = dialect.read(fields)
    n = 1 if fields.n is None else fields.n
    between("n", n, 1, settings.max_best_of)
    best_of = n if fields.best_of is None else fields.best_of
    between("best_of", best_of, n, settings.max_best_of)
    if best_of > n and fields.stream:
        raise invalid("best_of", f"is {best_of} and n is {n}; answers that are chosen among cannot be streamed")
    if fields.logprobs is not None:
        between("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    builder = SpecBuilder(
        fields,
        model,
        settings,
        dialect,
        arrival,
        max_tokens=_max_tokens(fields, dialect),
        logprobs=0 if best_of > n and fields.logprobs is None else fields.logprobs,
        samples=best_of,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )
    with arrival.tokenising():
        texts, prompts = _prompts(service, fields.prompt)
    constraint = constraint_of(fields, model)
    specs = [builder.spec(tokens, _name(fields.prompt, number)) for number, tokens in enumerate(prompts)]
    encoder = CompletionEncoder(model, fields, texts, n, dialect)
    return Job(
        specs=[with_grammar(settings, spec, constraint) for spec in specs],
        body=encoder.body,
        events=encoder.events,
        num_characters=sum(map(len, texts)),
        num_top=fields.logprobs or 0,
        unknown=[*unknown, *unread],
        user=fields.user or fields.safety_identifier,
        wants_timings=bool(fields.timings),
    )


def _max_tokens(fields: CompletionRequest, dialect: OpenAIDialect) -> int | None:
    if fields.max_tokens is None:
        return dialect.completion_max_tokens
    if fields.max_tokens < 0 or (fields.max_tokens == 0 and not fields.echo):
        raise invalid("max_tokens", f"is {fields.max_tokens}; it must be at least 1, or with echo at least 0")
    return fields.max_tokens


def _name(given: str | list[Any], index: int) -> str:
    """The name of a prompt in errors."""
    is_one = isinstance(given, str) or not isinstance(given[0], (str, list))
    return "prompt" if is_one else f"prompt[{index}]"


def _prompts(service: Service, given: str | list[Any]) -> tuple[list[str], list[list[int]]]:
    """The prompts as text and as tokens: a text, tokens, or a list of either."""
    model = service.model
    if isinstance(given, str):
        given = [given]
    if not given:
        raise invalid("prompt", "is []; it must hold at least one text or token")
    given = [whole(item) for item in given]
    is_one = all(type(item) is int for item in given)  # the tokens of one
    if is_one:
        given = [given]
    at_most("the number of prompts", len(given), service.settings.max_client_batch_size, param="prompt")
    if all(isinstance(item, str) for item in given):
        return given, model.tokenizer.encode_batch(given)
    for index, item in enumerate(given):
        if not (isinstance(item, list) and item and all(type(token) is int for token in item)):
            raise invalid(
                f"prompt[{index}]", f"is {shown(item)}; prompts are all texts, or all non-empty lists of token ids"
            )
        name = "prompt" if is_one else f"prompt[{index}]"
        model.check_prompt(item, name)
        model.tokenizer.check_ids(item, param=name)
    return [model.tokenizer.decode(item, skip_special_tokens=False) for item in given], given
