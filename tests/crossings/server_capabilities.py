"""Capabilities of servers: what stands in front of engines. `test_servers` crosses those that are `in_servers`."""

import signal

from tests.crossings.capability import ServerCapability
from tests.crossings.served_crowd import ServedCrowd

OPENAI = ("ChatRequest", "CompletionRequest", "ResponseRequest")


def _in(name: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{kind}.{name}" for kind in kinds)


def _of(kind: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{kind}.{name}" for name in names)


def _an_engine_is_killed(crowd: ServedCrowd) -> None:
    crowd.wait_for_text()
    crowd.signal("quire-engine", signal.SIGKILL)


def _an_engine_is_stopped(crowd: ServedCrowd) -> None:
    crowd.wait_for_text()
    crowd.signal("quire-engine", signal.SIGSTOP)


def _a_worker_is_killed(crowd: ServedCrowd) -> None:
    crowd.wait_for_text()
    crowd.cuts_connections = True
    crowd.signal("quire-http", signal.SIGKILL)


def _the_server_is_told_to_stop(crowd: ServedCrowd) -> None:
    crowd.wait_for_text()
    crowd.end()


_ENGINE_ENDS = (
    r"(the engine process|the process of engine \d) ended",
    r"(engine \d: )?the engine (process has ended|cannot be reached: .*); ",
)

AT_SERVER = [
    ServerCapability(
        name="stop strings",
        covers=(
            *_in("stop", *OPENAI, "Parameters"), "MessagesRequest.stop_sequences",
            *_in("include_stop_str_in_output", *OPENAI),
        ),
    ),
    ServerCapability(name="special tokens in text", covers=_in("skip_special_tokens", *OPENAI)),
    ServerCapability(
        name="streams",
        covers=(
            *_in("stream", *OPENAI, "MessagesRequest", "GenerateRequest"), *_in("stream_options", *OPENAI),
            "ServerSettings.max_buffered_tokens",
        ),
    ),
    ServerCapability(name="token ids in answers", covers=_in("return_token_ids", "ChatRequest", "CompletionRequest")),
    ServerCapability(
        name="tools",
        covers=(
            *_in("tools", "ChatRequest", "ResponseRequest", "MessagesRequest"),
            *_in("tool_choice", "ChatRequest", "ResponseRequest", "MessagesRequest"),
            *_in("parallel_tool_calls", "ChatRequest", "ResponseRequest"), "ChatRequest.tool_prompt",
        ),
    ),
    ServerCapability(name="thinking", covers=("ChatRequest.reasoning_effort", "ResponseRequest.reasoning")),
    ServerCapability(
        name="conversations",
        covers=(
            *_of("ChatRequest", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                 "documents"),
            *_of("MessagesRequest", "messages", "system"),
            *_of("ResponseRequest", "input", "instructions", "chat_template_kwargs", "truncation"),
            "Config.chat_template", "ServerSettings.parse_special_in_messages",
        ),
    ),
    ServerCapability(
        name="stored responses",
        covers=(
            *_of("ResponseRequest", "previous_response_id", "store", "background"),
            *_of("ServerSettings", "response_store", "max_stored_responses", "max_stored_bytes",
                 "stored_response_ttl_s"),
        ),
        config={"max_stored_responses": 3}, in_servers=True,
    ),
    ServerCapability(name="manners of text-generation-inference", covers=("ServerSettings.tgi_strict",)),
    ServerCapability(
        name="keys",
        covers=_of("ServerSettings", "api_key", "api_keys_file", "key_requests_per_minute", "key_tokens_per_minute"),
        config={"api_key": "one,two", "isolate_api_keys": True}, in_servers=True,
    ),
    ServerCapability(name="bounded load", covers=("ServerSettings.max_concurrent_requests",),
                     config={"max_concurrent_requests": 6}, in_servers=True,
                     explains=("request refused .* status=(429|529)",)),
    ServerCapability(name="spans", covers=("ServerSettings.otlp_endpoint",),
                     config={"otlp_endpoint": "http://127.0.0.1:9"}, in_servers=True),  # where nothing listens
    ServerCapability(name="several workers", covers=("ServerSettings.http_workers",),
                     config={"http_workers": 2}, in_servers=True),
    ServerCapability(name="several engines", covers=("ServerSettings.data_parallel",), config={"data_parallel": 2},
                     in_servers=True),
    ServerCapability(
        name="an engine process ends",
        covers=_of("ServerSettings", "max_engine_restarts", "wait_for_restart"),
        strike=_an_engine_is_killed, in_servers=True, explains=_ENGINE_ENDS,
    ),
    ServerCapability(
        name="a process hangs",
        covers=_of("ServerSettings", "stuck_after_s", "restart_after_s", "worker_restart_after_s"),
        config={"restart_after_s": 5.0}, strike=_an_engine_is_stopped, in_servers=True,
        explains=(*_ENGINE_ENDS, r"the engine.* has not been heard of|the engine.* is stuck|.* is killed"),
    ),
    ServerCapability(
        name="a worker ends", strike=_a_worker_is_killed, in_servers=True, explains=(r"quire-http-\d ended",),
    ),
    ServerCapability(
        name="the server drains", strike=_the_server_is_told_to_stop,
        in_servers=True, explains=("request refused .* status=(503|529)",),
    ),
    ServerCapability(name="clients leave", num_leaving=6, in_servers=True),
    ServerCapability(
        name="roles",
        covers=_of("PeerSettings", "role", "peers", "peer_min_tokens", "peer_timeout_s"),
        config={
            "role": "both", "peers": ("127.0.0.1:7100",), "peer_address": "127.0.0.1:7101",
            "peer_secret": "0123456789abcdef",
        },
    ),
    ServerCapability(
        name="groups",
        covers=("GroupSettings.group_size",),
        config={"group_size": 2, "group_address": "127.0.0.1:7000", "group_secret": "0123456789abcdef"},
    ),
]  # fmt: skip
