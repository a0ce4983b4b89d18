"""What every OpenAI reply carries besides its choices."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from starlette.responses import Response

from quire import __version__
from quire.request import FinishReason as Finish
from quire.server.api.openai.responses import ChatCompletion, Completion, FinishReason, Head, Usage
from quire.server.api.timing_headers import timing_headers
from quire.server.service.service import Service
from quire.server.service.stream import Stream

log = logging.getLogger(__name__)

MAX_NAMES = 20  # of fields that are not known, in the log and in a header
MAX_NAME = 60  # characters of each

FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.END: "stop",
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
}


class Reply:
    """The envelope of one reply. `unknown` are fields of the request that nothing knows: the client is told."""

    def __init__(self, prefix: str, service: Service, unknown: list[str]) -> None:
        as_tgi = service.settings.tgi_strict
        self.id = "" if as_tgi else f"{prefix}-{secrets.token_hex(12)}"
        self.fingerprint = f"{__version__}-native" if as_tgi else f"quire-{__version__}"
        self.created = int(time.time())
        self.model = service.model.name
        self.headers = ignored_header(unknown)

    def head(self, kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"]) -> Head:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    async def whole(
        self, write: Callable[[], Completion | ChatCompletion], stream: Stream, num_characters: int, num_top: int
    ) -> Response:
        """What `write` makes. `num_characters`: of the prompts; `num_top`: likely tokens shown beside each."""
        headers = self.headers | timing_headers(stream, num_characters)
        size = num_characters + (stream.num_prompt_tokens + stream.num_tokens) * (1 + num_top)
        content = await stream.service.offload.run(size, lambda: msgspec.json.encode(write()))
        return Response(content, 200, headers, "application/json")


def ignored_header(names: list[str]) -> dict[str, str]:
    """Tells the client which of its fields nothing here knows: names out of its body, made safe for a header."""
    if not names:
        return {}
    shown = [name[:MAX_NAME] for name in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    log.warning("fields that no route knows were ignored: %s%s", ", ".join(map(repr, shown)), more)
    safe = ["".join(c for c in name if c.isascii() and c.isprintable()) for name in shown]
    return {"x-quire-ignored-fields": ",".join(safe)}


def usage(stream: Stream) -> Usage:
    counts: Usage = {
        "prompt_tokens": stream.num_prompt_tokens,
        "completion_tokens": stream.num_tokens,
        "total_tokens": stream.num_prompt_tokens + stream.num_tokens,
    }
    if not stream.service.settings.tgi_strict:
        counts["prompt_tokens_details"] = {"cached_tokens": stream.num_cached_tokens}
    return counts
