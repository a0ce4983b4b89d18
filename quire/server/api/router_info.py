"""GET /server_info, /model_info and /get_load: the routes that routers call, in SGLang's format.

`model_path` and `tokenizer_path` are left out: a router would fetch a tokenizer by them, from the hub, and need none.
"""

from typing import Any, NotRequired, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.ipc.messages import Stats
from quire.server.service.service import Service


class ServerInfo(TypedDict):
    model_id: str
    served_model_name: str
    version: str
    context_length: int  # longest prompt and answer together
    max_req_input_len: int
    dp_size: int
    max_total_num_tokens: NotRequired[int]  # that the cache holds; once the engine has reported
    max_running_requests: NotRequired[int]  # slots, likewise


class ModelInfo(TypedDict):
    served_model_name: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool


class Load(TypedDict):
    dp_rank: int
    num_reqs: int  # sequences that run or wait
    num_waiting_reqs: int
    num_tokens: int  # in the pages that sequences hold


async def server_info(service: Service, request: Request) -> Response:
    model, stats = service.model, service.stats
    body: ServerInfo = {
        "model_id": model.name,
        "served_model_name": model.name,
        "version": __version__,
        "context_length": model.max_total_tokens,
        "max_req_input_len": model.max_input_tokens,
        "dp_size": 1,  # a router that counts several would address each of them
    }
    if stats is not None:
        body["max_total_num_tokens"] = stats.num_pages * stats.page_size
        body["max_running_requests"] = stats.num_slots
    return _json(body)


async def model_info(service: Service, request: Request) -> Response:
    body: ModelInfo = {
        "served_model_name": service.model.name,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
    return _json(body)


async def get_load(service: Service, request: Request) -> Response:
    return _json([] if service.stats is None else [_load(service.stats)])


def _load(stats: Stats) -> Load:
    return {
        "dp_rank": 0,
        "num_reqs": stats.num_running + stats.num_waiting,
        "num_waiting_reqs": stats.num_waiting,
        "num_tokens": stats.active_pages * stats.page_size,
    }


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
