"""Log lines with fields, as text or as JSON."""

import json
import logging
import sys
import time
from typing import Any

_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


MAX_TEXT = 8192  # characters of a line, or of a traceback: either may repeat what a client sent
MAX_EXTRA = 1024


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """`text`, without its middle where it is longer than `limit`."""
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[: limit // 2]}… {left_out} characters …{text[-limit // 2 :]}"


class TextFormatter(logging.Formatter):
    """`12:34:56 INFO message key=value ...`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = cut(super().format(record))
        return " ".join([line, *(f"{key}={_word(value)}" for key, value in _extra(record).items())])


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": cut(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = cut(self.formatException(record.exc_info))
        return json.dumps(entry | _extra(record), default=str)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """Fields that a line was given. Names that begin with an underscore are those of other programs, Ray's for one."""
    extra = {key: value for key, value in vars(record).items() if key not in _OWN and not key.startswith("_")}
    return {key: cut(value, MAX_EXTRA) if isinstance(value, str) else value for key, value in extra.items()}


class _Numbered(logging.Filter):
    """Adds the number of the engine, where there are several."""

    def __init__(self, engine: int) -> None:
        super().__init__()
        self._engine = engine

    def filter(self, record: logging.LogRecord) -> bool:
        record.engine = self._engine
        return True


def _word(value: Any) -> str:
    """A value as one word, quoted where it is not: no client can write lines of its own into the log."""
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


def configure_logs(format: str, level: int = logging.INFO, engine: int | None = None) -> None:
    """Log to standard error in this process. `engine`: its number is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    if engine is not None:
        handler.addFilter(_Numbered(engine))
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name in ("quire", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "quire" else logging.WARNING)
