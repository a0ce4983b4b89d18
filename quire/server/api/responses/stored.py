"""The routes of kept responses."""

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ResponseNotFound, invalid, shown
from quire.server.api.responses.resources import DeletedResponse
from quire.server.service.response_database import Item
from quire.server.service.service import Service
from quire.server.tenant import api_key

T = TypeVar("T")

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


async def get_response(service: Service, request: Request) -> Response:
    stream = request.query_params.get("stream", "false")
    if stream != "false":
        raise invalid("stream", f"is {shown(stream)}; a kept response is not streamed again")
    return _json(_found(request, await service.response_store.get(api_key.get(), _id(request))).body)


async def delete_response(service: Service, request: Request) -> Response:
    store, response_id = service.response_store, _id(request)
    if not await store.delete(api_key.get(), response_id):
        raise _not_found(response_id)
    store.stop(response_id)
    deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return _json(msgspec.json.encode(deleted))


async def cancel_response(service: Service, request: Request) -> Response:
    store, response_id = service.response_store, _id(request)
    found = _found(request, await store.cancel(api_key.get(), response_id))
    if not msgspec.json.decode(found.head, type=_Kind).background:
        raise invalid("response_id", f"is {shown(response_id)}, which does not run in the background")
    store.stop(response_id)
    return _json(found.body)


async def list_input_items(service: Service, request: Request) -> Response:
    limit, order, after = _paging(request)
    items = _found(request, await service.response_store.input_items(api_key.get(), _id(request)))
    if order == "desc":
        items = items[::-1]
    if after is not None:
        position = next((index for index, item in enumerate(items) if item.id == after), None)
        if position is None:
            raise invalid("after", f"is {shown(after)}; no item of this response has this id")
        items = items[position + 1 :]
    shown_items = items[:limit]
    return _json(_list(shown_items, has_more=len(items) > limit))


def _paging(request: Request) -> tuple[int, str, str | None]:
    given = request.query_params
    limit = given.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= MAX_LIMIT):
        raise invalid("limit", f"is {shown(limit)}; it must be between 1 and {MAX_LIMIT}")
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"is {shown(order)}; it can be asc or desc")
    return int(limit), order, given.get("after")


def _list(items: list[Item], *, has_more: bool) -> bytes:
    ends = {"first_id": items[0].id, "last_id": items[-1].id} if items else {"first_id": None, "last_id": None}
    data = [msgspec.Raw(item.json) for item in items]
    return msgspec.json.encode({"object": "list", "data": data, **ends, "has_more": has_more})


class _Kind(msgspec.Struct):
    background: bool


def _id(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id


def _found(request: Request, found: T | None) -> T:
    if found is None:
        raise _not_found(_id(request))
    return found


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"no response with the id {shown(response_id)} is kept", param="response_id")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
