"""The kept items that a request builds on."""

from typing import Any, NamedTuple

import msgspec

from quire.errors import PreviousResponseNotFound, ResponseNotFound, invalid, shown
from quire.server.api.responses.conversation import Placed
from quire.server.api.responses.items import ItemReader, kind_of, message
from quire.server.http.body import Body
from quire.server.service.response_database import MAX_CHAIN_BYTES, MAX_ITEMS, MAX_REFERRED_BYTES, Chain
from quire.server.service.service import Service
from quire.server.tenant import api_key


class History(NamedTuple):
    """Items in JSON: of the conversation before, and those that the request refers to."""

    chain: Chain
    referred: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chain.items)) + sum(map(len, self.referred.values()))

    def before(self) -> list[Placed]:
        return [Placed("previous_response_id", msgspec.json.decode(item)) for item in self.chain.items]


async def load_history(service: Service, body: Body) -> History:
    """Raises if `previous_response_id` names no response, or if there are too many items. Wrong types are refused
    elsewhere."""
    ids = await service.offload.run(body.num_bytes, lambda: _references(body.raw))
    previous = body.raw.get("previous_response_id")
    chain = Chain([])
    if isinstance(previous, str):
        chain = await _load_chain(service, previous, is_cut_allowed=body.raw.get("truncation") == "auto")
    return History(chain, await service.response_store.find(api_key.get(), ids) if ids else {})


async def _load_chain(service: Service, previous: str, *, is_cut_allowed: bool) -> Chain:
    store, name = service.response_store, "previous_response_id"
    chain = await store.chain(api_key.get(), previous) if store.is_on else None
    if chain is None:
        raise invalid(name, f"is {shown(previous)}; no response with this id is kept", PreviousResponseNotFound)
    if chain.is_running:
        raise invalid(name, f"is {shown(previous)}, which is still in progress")
    if chain.missing is not None:
        problem = f"is {shown(previous)}; it continues {chain.missing}, which is not kept any more"
        raise invalid(name, problem, PreviousResponseNotFound)
    if chain.is_cut and not is_cut_allowed:
        limit = f"the limit is {MAX_CHAIN_BYTES} bytes and {MAX_ITEMS} items"
        raise invalid(name, f"is {shown(previous)}, a longer conversation than is read; {limit}")
    return chain


def read_input(raw: str | list[dict[str, Any]], history: History, reader: ItemReader) -> list[Placed]:
    """The request's own items, references resolved."""
    if isinstance(raw, str):
        return [Placed("input", message("user", raw))]
    items = []
    num_bytes = 0  # of kept items, each as often as it is referred to
    for index, item in enumerate(raw):
        place = f"input[{index}]"
        if kind_of(item) != "item_reference":
            items.append(Placed(place, reader.read(place, item)))
            continue
        item_id = item.get("id")
        if not isinstance(item_id, str) or item_id not in history.referred:
            problem = f"is {shown(item_id)}; no item with this id is kept"
            raise invalid(f"{place}.id", problem, ResponseNotFound)
        num_bytes += len(history.referred[item_id])
        if num_bytes > MAX_REFERRED_BYTES:
            problem = f"is {shown(item_id)}; up to it items of {num_bytes} bytes are referred to"
            raise invalid(f"{place}.id", f"{problem}; the limit is {MAX_REFERRED_BYTES}")
        items.append(Placed(place, msgspec.json.decode(history.referred[item_id])))
    return items


def _references(raw: dict[str, Any]) -> list[str]:
    items = raw.get("input")
    if isinstance(items, list) and len(items) > MAX_ITEMS:
        raise invalid("input", f"has {len(items)} items; the limit is {MAX_ITEMS}")
    found = (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    ids = (item.get("id") for item in found if kind_of(item) == "item_reference")
    return list(dict.fromkeys(item_id for item_id in ids if isinstance(item_id, str)))
