"""Every setting of the front end."""

import logging
from dataclasses import dataclass, fields

from quire.config import setting
from quire.errors import InvalidSetting
from quire.text.stop_strings import MAX_STOPS

HTTP, ACCESS, LIMITS, API, OPERATIONS = "HTTP", "Access", "Limits", "API", "Operations"

_AT_LEAST_ONE = (
    "http_workers",
    "payload_limit",
    "max_concurrent_requests",
    "max_best_of",
    "max_client_batch_size",
    "max_buffered_tokens",
)
LOG_FORMATS = ("text", "json")
LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,
}


@dataclass(frozen=True)
class ServerSettings:
    """What was asked of the HTTP server. Names that text-generation-inference has are its names."""

    host: str = setting("127.0.0.1", HTTP, "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, HTTP, "Port to listen on; 0 for any that is free.")
    http_workers: int = setting(1, HTTP, "Processes that speak HTTP, sharing the port.")
    prometheus_port: int | None = setting(None, HTTP, "Another port that has /metrics, and nothing else.")
    payload_limit: int = setting(2_000_000, HTTP, "Bytes of a request's body.")
    keep_alive_s: float = setting(
        75.0, HTTP, "Seconds that a connection is kept after an answer; more than anybody is told to stay away."
    )
    api_key: str | None = setting(None, ACCESS, "Key that requests must carry; several are separated by commas.")
    isolate_api_keys: bool = setting(
        False, ACCESS, "Requests with different keys share no cached pages, and so cannot tell what the others asked."
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (), ACCESS, "Origin whose pages may ask; several by commas or by repeating it, * for all."
    )
    max_concurrent_requests: int = setting(
        2048, LIMITS, "Sequences that one worker has open, one for each prompt and sample; more are answered 429."
    )
    max_best_of: int = setting(20, LIMITS, "Samples of one prompt.")
    max_stop_sequences: int = setting(MAX_STOPS, LIMITS, "Stop strings of one request.")
    max_top_n_tokens: int = setting(20, LIMITS, "Likely tokens shown beside each token.")
    max_client_batch_size: int = setting(256, LIMITS, "Prompts in one request.")
    max_input_tokens: int | None = setting(None, LIMITS, "Longest prompt; as long as a sequence if not given.")
    max_buffered_tokens: int = setting(65_536, LIMITS, "Tokens kept for a client that does not read.")
    request_timeout_s: float | None = setting(None, LIMITS, "Seconds that a request may take.")
    queue_timeout_s: float | None = setting(None, LIMITS, "Seconds that a request may wait for a slot.")
    served_model_name: str | None = setting(None, API, "What clients call the model; its own name if not given.")
    strict: bool = setting(False, API, "Refuse fields that no route knows, instead of warning about them.")
    tgi_strict: bool = setting(
        False, API, "Answer as text-generation-inference does where that is wrong or unusual; see docs/api.md."
    )
    parse_special_in_messages: bool = setting(
        False,
        API,
        "Special tokens written out in messages, tools and documents become those tokens; else they are plain text.",
    )
    enable_prefill_logprobs: bool = setting(
        False, API, "With --tgi-strict: fill in decoder_input_details, which are empty there otherwise."
    )
    disable_grammar_support: bool = setting(False, API, "Refuse requests that ask for structured output.")
    aip_predict_route: str | None = setting(None, API, "Another path for /vertex, as Vertex AI chooses it.")
    aip_health_route: str | None = setting(None, API, "Another path for /health, as Vertex AI chooses it.")
    drain_s: float = setting(90.0, OPERATIONS, "Seconds that requests have to finish once the server is told to stop.")
    stuck_after_s: float = setting(
        1.5,
        OPERATIONS,
        "/health turns red when there is work and no step has ended for longer, and for longer than ten times what "
        "steps like it took.",
    )
    restart_after_s: float = setting(
        30.0,
        OPERATIONS,
        "The engine process is killed and started again when a step takes longer, and longer than ten times what "
        "steps like it took; or when the process says nothing for so long. 0 never does.",
    )
    worker_restart_after_s: float = setting(
        30.0, OPERATIONS, "An HTTP worker that says nothing for so long is killed and started again. 0 never does."
    )
    max_engine_restarts: int = setting(
        16, OPERATIONS, "Quick ends of the engine process in a row after which it is not started again."
    )
    wait_for_restart: bool = setting(
        True, OPERATIONS, "Requests that come while the engine restarts wait for it; else they are answered 503."
    )
    log_format: str = setting("text", OPERATIONS, "text, or json for one object a line.")
    log_level: str = setting("info", OPERATIONS, "What is logged: debug, info, warning or error, and what is worse.")
    otlp_endpoint: str | None = setting(
        None, OPERATIONS, "Collector of OpenTelemetry spans, as http://localhost:4317; needs the otel extra."
    )
    otlp_service_name: str = setting("quire", OPERATIONS, "What spans call this server.")
    compute_type: str | None = setting(
        None, OPERATIONS, "What the header x-compute-type says; the platform if not given."
    )

    @property
    def api_keys(self) -> tuple[str, ...]:
        return _listed(self.api_key)

    @property
    def parses_special_in_messages(self) -> bool:
        """As text-generation-inference does, too."""
        return self.parse_special_in_messages or self.tgi_strict

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return tuple(origin for given in self.cors_allow_origin for origin in _listed(given))

    @property
    def logging_level(self) -> int:
        """As the logging module has it. Levels of single modules, as in `info,name=debug`, are left out."""
        words = [word for word in _listed(self.log_level.lower()) if "=" not in word]
        return LOG_LEVELS[words[0] if words else "info"]

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; it must be at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value is not None and value < 0:
                raise InvalidSetting(f"{field.name} is {value}; it must be at least 0")
        if not 0 <= self.port <= 65535:
            raise InvalidSetting(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("aip_predict_route", "aip_health_route"):
            if not (getattr(self, name) or "/").startswith("/"):
                raise InvalidSetting(f"{name} is {getattr(self, name)!r}; it must begin with /")
        if self.prometheus_port is not None and not 1 <= self.prometheus_port <= 65535:
            raise InvalidSetting(f"prometheus_port is {self.prometheus_port}; it must be between 1 and 65535")
        try:
            _ = self.logging_level
        except KeyError as unknown:
            raise InvalidSetting(f"log_level is {unknown.args[0]!r}; it can be {', '.join(LOG_LEVELS)}") from None
        if self.log_format not in LOG_FORMATS:
            raise InvalidSetting(f"log_format is {self.log_format!r}; it can be {' or '.join(LOG_FORMATS)}")
        if self.api_key is not None and not self.api_keys:
            raise InvalidSetting("api_key is empty; leave it out to let everyone in")


def _listed(given: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (given or "").split(",") if part.strip())
