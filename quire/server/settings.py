"""Settings of the HTTP server."""

import logging
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from quire.errors import InvalidSetting
from quire.server.api_keys import ApiKey, check_distinct, key_of, read_keys
from quire.settings.config import DEVICES, setting
from quire.text.stop_strings import MAX_STOPS

HTTP, ACCESS, LIMITS, API, OPERATIONS = "HTTP", "Access", "Limits", "API", "Operations"

_AT_LEAST_ONE = (
    "data_parallel",
    "http_workers",
    "payload_limit",
    "max_concurrent_requests",
    "max_best_of",
    "max_client_batch_size",
    "max_buffered_tokens",
)
_AT_LEAST_ZERO = (
    "max_stop_sequences",
    "max_top_n_tokens",
    "max_stored_responses",
    "max_stored_bytes",
    "max_engine_restarts",
)
_ABOVE_ZERO = ("ssl_handshake_s", "request_timeout_s", "queue_timeout_s")  # seconds; others may be 0
MAX_SEED = 2**63 - 1
MAX_S = 1e9  # of any time: 31 years. Beyond, clocks and timers overflow
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
    """Settings of the HTTP server. Those that text-generation-inference has keep their names."""

    host: str = setting("127.0.0.1", HTTP, "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = setting(8000, HTTP, "Port to listen on; 0 for a free one.")
    http_workers: int = setting(1, HTTP, "HTTP processes, sharing the port.")
    prometheus_port: int | None = setting(None, HTTP, "Additional port that serves /metrics only.")
    payload_limit: int = setting(2_000_000, HTTP, "Largest request body, in bytes.")
    ssl_certfile: Path | None = setting(None, HTTP, "Certificate in PEM form, with its chain: serve HTTPS only.")
    ssl_keyfile: Path | None = setting(None, HTTP, "Key of the certificate; by default it is in the same file.")
    ssl_keyfile_password: str | None = setting(None, HTTP, "Password of the key, where it is encrypted.")
    ssl_handshake_s: float = setting(10.0, HTTP, "Seconds within which a client must have made its TLS handshake.")
    keep_alive_s: float = setting(75.0, HTTP, "Seconds that an idle connection is kept; longer than any Retry-After.")
    api_key: str | None = setting(None, ACCESS, "API key that requests must carry; several are separated by commas.")
    api_keys_file: Path | None = setting(
        None,
        ACCESS,
        "TOML file of more keys: a table for each, by its name, with key or sha256, and limits; see docs/operations.",
    )
    key_requests_per_minute: int | None = setting(
        None, ACCESS, "Requests that each key may send in a minute, unless the file says otherwise; beyond, 429."
    )
    key_tokens_per_minute: int | None = setting(
        None, ACCESS, "Tokens of prompts and answers that each key may have in a minute, likewise."
    )
    isolate_api_keys: bool = setting(
        False,
        ACCESS,
        "Requests with different keys share no cached prefixes, so that none can probe for the prompts of others.",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (), ACCESS, "Origin that may send requests from browsers; comma-separated, or repeat the option; * for all."
    )
    max_concurrent_requests: int = setting(
        2048, LIMITS, "Open sequences of one worker, one per prompt and sample; beyond, requests get 429."
    )
    max_best_of: int = setting(20, LIMITS, "Most samples of one prompt.")
    max_stop_sequences: int = setting(MAX_STOPS, LIMITS, "Most stop strings of one request.")
    max_top_n_tokens: int = setting(20, LIMITS, "Most alternatives shown for each token.")
    max_client_batch_size: int = setting(256, LIMITS, "Most prompts in one request.")
    max_input_tokens: int | None = setting(None, LIMITS, "Longest prompt, in tokens; by default max_total_tokens.")
    max_buffered_tokens: int = setting(
        65_536, LIMITS, "Tokens buffered for a client that does not read; beyond, its request is ended."
    )
    request_timeout_s: float | None = setting(
        None, LIMITS, "Seconds after which a request is ended with 504, or a stream with an error."
    )
    queue_timeout_s: float | None = setting(
        None, LIMITS, "Seconds after which a request that has no slot is ended in the same way."
    )
    served_model_name: str | None = setting(None, API, "Model name for clients; by default its own.")
    strict: bool = setting(False, API, "Refuse unknown fields instead of warning about them.")
    tgi_strict: bool = setting(
        False, API, "Imitate text-generation-inference where it is wrong or unusual; see docs/api.md."
    )
    parse_special_in_messages: bool = setting(
        False,
        API,
        "Parse special tokens written out in messages, tools and documents; by default they are plain text.",
    )
    enable_prefill_logprobs: bool = setting(
        False,
        API,
        "With --tgi-strict: fill decoder_input_details, which are empty there by default. Without it they are always "
        "filled.",
    )
    seed: int | None = setting(
        None,
        API,
        "Requests that name no seed get those that follow from this one, in the order in which they come, so that the "
        "same run has the same seeds; by default they get random ones.",
    )
    disable_grammar_support: bool = setting(False, API, "Refuse requests for structured output.")
    aip_predict_route: str | None = setting(None, API, "Additional path of /vertex, for Vertex AI.")
    aip_health_route: str | None = setting(None, API, "Additional path of /health, for Vertex AI.")
    response_store: str | None = setting(
        None,
        API,
        "SQLite file that keeps responses; by default memory does, and with several HTTP processes a temporary file.",
    )
    max_stored_responses: int = setting(10_000, LIMITS, "Most responses that are kept, of all API keys; 0 keeps none.")
    max_stored_bytes: int = setting(256 * 2**20, LIMITS, "Most bytes of responses that are kept, of all API keys.")
    stored_response_ttl_s: float = setting(86_400.0, LIMITS, "Seconds after its last use that a response is kept.")
    drain_s: float = setting(90.0, OPERATIONS, "Seconds that open requests have to finish after SIGTERM or Ctrl-C.")
    stuck_after_s: float = setting(
        1.5,
        OPERATIONS,
        "/health turns red when there is work and no step has ended for this many seconds, and for ten times as long "
        "as similar steps took.",
    )
    restart_after_s: float = setting(
        30.0,
        OPERATIONS,
        "The engine process is restarted when a step takes longer than this many seconds and than ten times as long "
        "as similar steps took, or when the process is silent for as long. 0: never.",
    )
    worker_restart_after_s: float = setting(
        30.0, OPERATIONS, "An HTTP worker that is silent for this many seconds is restarted. 0: never."
    )
    max_engine_restarts: int = setting(
        16, OPERATIONS, "Most restarts in a row of a process that ends quickly; after them it is not started again."
    )
    wait_for_restart: bool = setting(
        True, OPERATIONS, "Let requests that arrive while the engine restarts wait for it; otherwise they get 503."
    )
    data_parallel: int = setting(
        1,
        DEVICES,
        "Engine processes, each with the whole model on devices of its own; requests are divided among them. Not with "
        "--group-size.",
    )
    log_format: str = setting("text", OPERATIONS, "text, or json for one object per line.")
    log_level: str = setting("info", OPERATIONS, "Least level that is logged: debug, info, warning or error.")
    otlp_endpoint: str | None = setting(
        None, OPERATIONS, "OpenTelemetry collector of spans, as in http://localhost:4317; needs the otel extra."
    )
    otlp_service_name: str = setting("quire", OPERATIONS, "Service name in spans.")
    compute_type: str | None = setting(None, OPERATIONS, "Value of the header x-compute-type; by default the platform.")

    @cached_property
    def keys(self) -> tuple[ApiKey, ...]:
        """All API keys. Read once: the workers are given what was read at the start."""
        limits = {"requests_per_minute": self.key_requests_per_minute, "tokens_per_minute": self.key_tokens_per_minute}
        listed = [key_of(f"key-{place}", key, limits) for place, key in enumerate(_listed(self.api_key), start=1)]
        return (*listed, *(read_keys(self.api_keys_file, limits) if self.api_keys_file is not None else ()))

    def min_priority(self, key_name: str) -> int | None:
        """The least priority that requests with a key may have; None, for any, where the server has no keys."""
        return self._min_priorities.get(key_name)

    @cached_property
    def _min_priorities(self) -> dict[str, int]:
        return {key.name: key.min_priority for key in self.keys}

    @property
    def parses_special_in_messages(self) -> bool:
        """True with the setting, and with --tgi-strict."""
        return self.parse_special_in_messages or self.tgi_strict

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return tuple(origin for given in self.cors_allow_origin for origin in _listed(given))

    @property
    def logging_level(self) -> int:
        """The level as the logging module has it. Levels of single modules, as in `info,name=debug`, are ignored."""
        words = [word for word in _listed(self.log_level.lower()) if "=" not in word]
        return LOG_LEVELS[words[0] if words else "info"]

    def __post_init__(self) -> None:
        self._check_ranges()
        if not 0 <= self.port <= 65535:
            raise InvalidSetting(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("aip_predict_route", "aip_health_route"):
            if not (getattr(self, name) or "/").startswith("/"):
                raise InvalidSetting(f"{name} is {getattr(self, name)!r}; it must begin with /")
        if self.compute_type is not None and not (self.compute_type.isascii() and self.compute_type.isprintable()):
            raise InvalidSetting(
                f"compute_type is {self.compute_type!r}; it must be printable ASCII on one line, as headers are"
            )
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise InvalidSetting(f"seed is {self.seed}; it must be between {-MAX_SEED} and {MAX_SEED}")
        if self.prometheus_port is not None and not 1 <= self.prometheus_port <= 65535:
            raise InvalidSetting(f"prometheus_port is {self.prometheus_port}; it must be between 1 and 65535")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password) is not None:
            raise InvalidSetting("ssl_keyfile and ssl_keyfile_password need ssl_certfile")
        try:
            _ = self.logging_level
        except KeyError as unknown:
            raise InvalidSetting(f"log_level is {unknown.args[0]!r}; it can be {', '.join(LOG_LEVELS)}") from None
        if self.log_format not in LOG_FORMATS:
            raise InvalidSetting(f"log_format is {self.log_format!r}; it can be {' or '.join(LOG_FORMATS)}")
        if self.api_key is not None and not _listed(self.api_key):
            raise InvalidSetting("api_key is empty; leave it out to require none")
        check_distinct(self.keys)
        for name in ("key_requests_per_minute", "key_tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSetting(f"{name} is {value}; it must be at least 1")
            if value is not None and not self.keys:
                raise InvalidSetting(f"{name} is {value}; it needs api_key or api_keys_file")

    def _check_ranges(self) -> None:
        for names, lowest in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            for name in names:
                if getattr(self, name) < lowest:
                    raise InvalidSetting(f"{name} is {getattr(self, name)}; it must be at least {lowest}")
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not field.name.endswith("_s") or seconds is None:
                continue
            is_above = seconds > 0 or (seconds == 0 and field.name not in _ABOVE_ZERO)
            if not (is_above and seconds <= MAX_S):  # nor is NaN
                rule = "above 0 and" if field.name in _ABOVE_ZERO else "at least 0 and"
                raise InvalidSetting(f"{field.name} is {seconds:g}; it must be {rule} at most {MAX_S:g}")
        for name in ("host", "served_model_name"):  # an empty host would be every interface
            if getattr(self, name) == "":
                raise InvalidSetting(f"{name} is empty; leave it out for the default")


def _listed(given: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (given or "").split(",") if part.strip())
