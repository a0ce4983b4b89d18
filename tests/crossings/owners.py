"""The settings and fields that the table is compared with, and those of them that cross nothing."""

from dataclasses import fields
from typing import Any

from quire.core.limits import Limits
from quire.request import Grammar, Request, SamplingParams, ThinkingBudget
from quire.server.api.anthropic.requests import MessagesRequest
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.responses.requests import ResponseRequest
from quire.server.api.tgi.requests import GenerateRequest, Parameters
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings

SETTINGS = (Config, Limits, ServerSettings, FolderSettings, PeerSettings, GroupSettings)
OF_ENGINES = (Request, SamplingParams, Grammar, ThinkingBudget)
OF_CLIENTS = (ChatRequest, CompletionRequest, MessagesRequest, ResponseRequest, GenerateRequest, Parameters)


def _names(owner: Any) -> tuple[str, ...]:
    if owner in OF_CLIENTS:
        return tuple(owner.__struct_fields__)
    return tuple(field.name for field in fields(owner))


# Every setting and field, as `Owner.name`.
OWNED = [f"{owner.__name__}.{name}" for owner in (*SETTINGS, *OF_ENGINES, *OF_CLIENTS) for name in _names(owner)]


def _for_each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


def _in(owner: str, reason: str, *names: str) -> dict[str, str]:
    return {f"{owner}.{name}": reason for name in names}


_OPENAI = ("ChatRequest", "CompletionRequest", "ResponseRequest")
_FOR_LOGS = "is written to logs and spans"
_FOR_CLIENTS = "is repeated to the client, or means nothing here"
_FILES = "says where files are"

# By setting or field, the reason why it changes nothing that others do.
CROSSES_NOTHING: dict[str, str] = {
    **_in("Config", _FILES, "model", "revision", "tokenizer", "token", "offline", "cache_dir", "hub_cache"),
    "Config.dtype": "all dtypes run the same programs and schedules; tests/models compares their numbers",
    "Config.random_seed": "weights are weights",
    "Config.tensor_parallel": "tests/executor/tensor_parallel.py crosses it, in a process that has several devices",
    "Config.page_size": "crossings have pages of one size, tests/core/test_schedules.py of any",
    "Limits.page_size": "crossings have pages of one size, tests/core/test_schedules.py of any",
    **_in("Config", "says when programs are compiled, not which", "compile_ahead", "compile_threads",
          "compile_processes"),
    "Limits.host_page_bytes": "is for statistics",
    "Request.request_id": "names the request",
    "Request.sampling": "SamplingParams has the fields",
    **_in("ServerSettings", "is of connections, which have no part in answers", "host", "port", "prometheus_port",
          "payload_limit", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_handshake_s", "keep_alive_s",
          "cors_allow_origin", "aip_predict_route", "aip_health_route", "compute_type"),
    **_in("ServerSettings", _FOR_LOGS, "log_format", "log_level", "otlp_service_name"),
    **_in("ServerSettings", "refuses before anything is done", "strict", "max_client_batch_size", "max_input_tokens",
          "max_stop_sequences"),
    "ServerSettings.served_model_name": _FOR_CLIENTS,
    **_in("GroupSettings", "says where members meet", "group_rank", "group_address", "group_secret_file",
          "group_secret"),
    **_in("PeerSettings", "says where peers meet", "peer_address", "peer_secret_file", "peer_secret"),
    **{f"{owner}.{name}": reason for owner in _OPENAI for name, reason in {
        "model": _FOR_CLIENTS, "user": _FOR_LOGS, "safety_identifier": _FOR_LOGS, "prompt_cache_key": _FOR_CLIENTS,
        "metadata": _FOR_CLIENTS, "service_tier": _FOR_CLIENTS, "guided_decoding_backend": "there is one",
    }.items()},
    **_for_each("is accepted and named in a warning", "ChatRequest.verbosity"),
    **_for_each("there is nothing stored by this route", "ChatRequest.store", "CompletionRequest.store"),
    "ResponseRequest.max_tool_calls": "there are no hosted tools",
    **_in("MessagesRequest", _FOR_CLIENTS, "model", "metadata", "service_tier", "cache_control", "speed",
          "user_profile_id", "context_management"),
    "GenerateRequest.parameters": "Parameters has the fields",
    "Parameters.truncate": "cuts the prompt before it is sent",
    "Parameters.return_full_text": "puts the prompt before the text",
}  # fmt: skip
