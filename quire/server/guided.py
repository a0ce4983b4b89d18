"""Answers that follow a grammar."""

from dataclasses import replace

from quire.errors import InvalidRequest
from quire.request import Grammar
from quire.server.service import Service
from quire.server.stream import Asked


async def guided(
    service: Service, asked: Asked, name: str, grammar: Grammar | None, checked: Grammar | None = None
) -> Asked:
    """`asked`, with the grammar that the field `name` asks for. Refuses what cannot be followed.

    `checked` stands in for a grammar with special tokens, which the check knows none of.
    """
    if grammar is None:
        return asked
    request = asked.request
    if service.settings.disable_grammar_support:
        raise InvalidRequest(f"{name} is set; this server was started with --disable-grammar-support")
    if not request.end_ids:
        raise InvalidRequest(f"{name} is set; the model has no end-of-sequence token to end such an answer with")
    if request.ignore_end:
        raise InvalidRequest(f"ignore_eos is true; with {name} an answer ends where its grammar does")
    if request.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}; with {name} an answer ends where its grammar does, so it must be 0"
        )
    await service.grammar_check.refuse_what_cannot_be_followed(name, checked or grammar)
    return replace(asked, request=replace(request, grammar=grammar))
