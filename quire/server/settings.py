"""Every setting of the front end."""

from dataclasses import dataclass, fields

from quire.errors import InvalidSetting

_AT_LEAST_ONE = (
    "http_workers",
    "payload_limit",
    "max_concurrent_requests",
    "max_best_of",
    "max_client_batch_size",
    "max_buffered_tokens",
)


@dataclass(frozen=True)
class ServerSettings:
    """What was asked of the HTTP server. Names that text-generation-inference has are its names."""

    host: str = "127.0.0.1"
    port: int = 8000
    http_workers: int = 1
    served_model_name: str | None = None  # what clients call the model; its own name if not given
    api_keys: tuple[str, ...] = ()  # any of them opens the door; none leaves it open
    cors_allow_origin: tuple[str, ...] = ()
    payload_limit: int = 2_000_000  # bytes of a request's body
    max_concurrent_requests: int = 2048  # of one worker
    max_best_of: int = 20  # samples of one prompt
    max_stop_sequences: int = 16
    max_top_n_tokens: int = 20
    max_client_batch_size: int = 256  # prompts in one request
    max_input_tokens: int | None = None  # one less than the sequence limit if not given
    max_buffered_tokens: int = 65_536  # of one stream whose client does not read
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    drain_s: float = 90.0  # what runs may take so long to finish once the server is told to stop
    stuck_after_s: float = 2.0  # a step that takes longer, and ten times the longest before it, is stuck
    strict: bool = False  # refuse fields that no route knows, instead of warning about them
    tgi_strict: bool = False  # refuse and default as text-generation-inference does, also where it is wrong
    log_prompts: bool = False

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
