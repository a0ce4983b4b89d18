"""A request for a response as a job."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.errors import PromptTooLong, invalid
from quire.server.api.chat import PreparedChat, prepare_chat
from quire.server.api.dialect import Dialect
from quire.server.api.job import Job
from quire.server.api.responses.conversation import ItemConversation, Placed
from quire.server.api.responses.encoder import ResponseEncoder
from quire.server.api.responses.history import History, read_input
from quire.server.api.responses.items import ItemReader
from quire.server.api.responses.requests import REASONING_REFUSALS, REFUSALS, Reasoning, ResponseRequest, TextConfig
from quire.server.api.responses.translation import chat_request
from quire.server.api.validation import typed
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.server.tenant import api_key

MAX_TRIES = 6  # to find how much of a conversation fits
LEAST_ROOM = 8  # one part in this many of the context is left for an answer without a given length


class ParsedResponse(NamedTuple):
    job: Job
    encoder: ResponseEncoder


def parse_response(
    service: Service, dialect: Dialect, arrival: Arrival, raw: dict[str, Any], *, history: History
) -> ParsedResponse:
    strict = service.settings.strict
    fields, unknown = typed(raw, ResponseRequest, REFUSALS, strict=strict)
    if fields.reasoning is not None:
        unknown += typed(raw["reasoning"], Reasoning, REASONING_REFUSALS, strict=strict, where="reasoning.")[1]
    if fields.text is not None:
        unknown += typed(raw["text"], TextConfig, {}, strict=strict, where="text.")[1]
        if fields.text.verbosity not in (None, "medium"):
            unknown.append("text.verbosity")
    reader = ItemReader(strict=strict)
    own = read_input(fields.input, history, reader)
    prepared = _prepare(service, dialect, arrival, fields, [*history.before(), *own])
    store = service.response_store
    encoder = ResponseEncoder(
        service.model,
        fields,
        prepared,
        [item for _, item in own],
        is_stored=fields.store is not False and store.is_on,
    )

    async def keep(stream: Stream) -> bool:  # in the context of the request; this function may be in a thread
        if not encoder.is_stored or not encoder.is_finished:
            return True
        encoder.is_stored = await store.add(api_key.get(), encoder.ended(stream)) is None
        return encoder.is_stored

    job = Job(
        specs=[prepared.spec],
        body=encoder.body,
        events=encoder.events,
        keep=keep,
        num_characters=len(prepared.text),
        num_top=fields.top_logprobs or 0,
        unknown=[*unknown, *reader.unknown, *prepared.unknown],
        user=fields.user or fields.safety_identifier,
        wants_timings=bool(fields.timings),
    )
    return ParsedResponse(job, encoder)


def _prepare(
    service: Service, dialect: Dialect, arrival: Arrival, fields: ResponseRequest, items: list[Placed]
) -> PreparedChat:
    """The chat that the items stand for; with `truncation` as many of the latest as fit."""
    if not items and fields.instructions is None:
        raise invalid("input", "is empty; there must be an item, or instructions")

    def attempt(items: Sequence[Placed]) -> PreparedChat:
        conversation = ItemConversation(fields.instructions, items)
        chat = chat_request(fields, conversation.messages)
        return prepare_chat(service, dialect, arrival, chat, own_name=conversation.own_name)

    try:
        return attempt(items)
    except PromptTooLong as error:
        if fields.truncation != "auto":
            raise
        least_room = 1 if fields.max_output_tokens else service.model.max_total_tokens // LEAST_ROOM
        shorter = _longest_that_fits(attempt, items, least_room)
        if shorter is None:
            raise error
        return shorter


def _longest_that_fits(
    attempt: Callable[[Sequence[Placed]], PreparedChat], items: list[Placed], least_room: int
) -> PreparedChat | None:
    """The items without some of the earliest turns. None if even the last turn does not fit."""
    turns = [index for index, (_, item) in enumerate(items) if item.get("role") == "user"][1:]
    best: PreparedChat | None = None
    low, high = 0, len(turns) - 1
    is_last = True  # the last turn by itself is tried first
    for _ in range(MAX_TRIES):
        if low > high:
            break
        middle = high if is_last else (low + high) // 2
        before, kept = items[: turns[middle]], items[turns[middle] :]
        system = [placed for placed in before if placed.item.get("role") in ("system", "developer")]
        try:
            prepared = attempt([*system, *kept])
            fits = prepared.spec.request.max_tokens >= least_room
        except PromptTooLong:
            fits = False
        if not fits and is_last:
            return None
        if fits:
            best, high = prepared, middle - 1
        else:
            low = middle + 1
        is_last = False
    return best
