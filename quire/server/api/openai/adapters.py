"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import InvalidSetting, invalid
from quire.server.api.validation import typed
from quire.server.http.body import read_json
from quire.server.service.service import Service
from quire.settings.adapters import check_adapter_name

MAX_PATH = 4096  # characters


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str  # below --adapter-folder
    load_inplace: bool | None = None  # replaces an adapter of the same name


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None  # sent by clients of vLLM; only the name is used


async def load_adapter(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    fields, _ = typed(body.raw, LoadAdapterRequest, {}, strict=True)
    name, path = fields.lora_name, fields.lora_path
    try:
        check_adapter_name(name)
    except InvalidSetting as error:
        raise invalid("lora_name", f": {error.message}") from None
    if not path or "\0" in path or len(path) > MAX_PATH:
        raise invalid("lora_path", f"must have 1 to {MAX_PATH} characters, and none of them zero")
    await service.adapters.load(name, path, service.engines, replaces=bool(fields.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    fields, _ = typed(body.raw, UnloadAdapterRequest, {}, strict=True)
    await service.adapters.unload(fields.lora_name, service.engines)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")
