"""Answers that follow a grammar."""

import asyncio
from dataclasses import replace

from quire.errors import DeadlineExceeded, InvalidRequest
from quire.request import Grammar
from quire.server.service.arrival import Arrival
from quire.server.service.job import GenerationSpec
from quire.server.service.service import Service


async def guided(
    service: Service,
    arrival: Arrival,
    spec: GenerationSpec,
    name: str,
    grammar: Grammar | None,
    checked: Grammar | None = None,
) -> GenerationSpec:
    """`spec` with the grammar that the field `name` asks for. Refuses what cannot be followed, and what is not known
    to be before the request's time has passed.

    `checked` stands in for a grammar with special tokens, which the check knows none of.
    """
    if grammar is None:
        return spec
    request = spec.request
    if service.settings.disable_grammar_support:
        raise InvalidRequest.for_field(name, "is set; this server was started with --disable-grammar-support")
    if not request.end_ids:
        raise InvalidRequest.for_field(
            name, "is set; the model has no end-of-sequence token to end such an answer with"
        )
    if request.ignore_end:
        raise InvalidRequest.for_field("ignore_eos", f"is true; with {name} an answer ends where its grammar does")
    if request.min_tokens:
        raise InvalidRequest.for_field(
            "min_tokens", f"is {request.min_tokens}; with {name} an answer ends where its grammar does, so it must be 0"
        )
    timeout_s = service.settings.request_timeout_s
    try:
        async with asyncio.timeout(None if timeout_s is None else timeout_s - arrival.times.total_s):
            await service.grammar_check.refuse_what_cannot_be_followed(name, checked or grammar)
    except TimeoutError as error:
        raise DeadlineExceeded(f"timeout_s of {timeout_s} passed before {name} was checked") from error
    return replace(spec, request=replace(request, grammar=grammar))
