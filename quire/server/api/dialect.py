"""How each API writes its answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from quire.errors import QuireError
from quire.server.api.openai.errors import error_response as openai_error
from quire.server.api.openai.responses import OpenAIError
from quire.server.api.tgi.errors import error_response as tgi_error
from quire.server.api.tgi.responses import TGIError


@dataclass(frozen=True)
class Dialect:
    """Chosen once for each route; see quire/server/http/route.py."""

    error_body: Any
    error_response: Callable[[QuireError], Response]

    @property
    def under_tgi_strict(self) -> "Dialect":
        """With --tgi-strict every API answers as text-generation-inference does."""
        return TGI


OPENAI = Dialect(OpenAIError, openai_error)
TGI = Dialect(TGIError, tgi_error)
