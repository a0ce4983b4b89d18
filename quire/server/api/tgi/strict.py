"""--tgi-strict: text-generation-inference's behaviour where it is wrong or unusual."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from quire import __version__
from quire.errors import QuireError, invalid
from quire.request import FinishReason as Finish
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.openai.envelope import DONE
from quire.server.api.openai.requests import ChatRequest, SamplingFields, ignored_fields
from quire.server.api.openai.responses import FinishReason
from quire.server.api.tgi.dialect import TGI
from quire.server.api.tgi.errors import error_response
from quire.server.api.tgi.requests import Parameters
from quire.server.api.tgi.responses import TGIError

T = TypeVar("T", bound=SamplingFields)

CHAT_FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.END: "stop",
    Finish.STOP_TOKEN: "stop_sequence",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "length",
}
_UNREAD = ("n", "logit_bias")  # fields of a chat
MAX_PASS_TOKENS = 1024  # the search starts over after this many tokens and forgets earlier text
_WINDOW, _KEPT = 300, 200  # characters


class EndAnchoredStops:
    """Sees a stop string only where a token ends with it, in the last few hundred characters of a pass."""

    def __init__(self, stops: Sequence[str], include: bool = True) -> None:
        self._stops = stops
        self._seen = ""
        self._num_tokens = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Add one token's text. Nothing is held back, and a match stays in the answer."""
        self._num_tokens += 1
        if self._num_tokens % MAX_PASS_TOKENS == 0:
            self._seen = ""
            return text, None
        self._seen += text
        if len(self._seen) > _WINDOW:
            self._seen = self._seen[-_KEPT:]
        before_line_end = self._seen.removesuffix("\n")  # it looks by a pattern that ends in $
        return text, next(
            (stop for stop in self._stops if self._seen.endswith(stop) or before_line_end.endswith(stop)), None
        )

    def flush(self) -> tuple[str, str | None]:
        return "", None


def read(fields: T) -> tuple[T, list[str]]:
    """The fields of an OpenAI request as they count, and the names of those that are not read."""
    _check_sampling(top_p=fields.top_p, temperature=fields.temperature or None, seed=fields.seed)
    if not isinstance(fields, ChatRequest):
        return fields, ignored_fields(fields)
    unread = [name for name in _UNREAD if getattr(fields, name) is not None]
    changes: dict[str, Any] = dict.fromkeys(unread)
    if fields.presence_penalty is not None:
        changes |= {"presence_penalty": None, "repetition_penalty": fields.presence_penalty + 2.0}
    return msgspec.structs.replace(fields, **changes), [*unread, *ignored_fields(fields)]


def _check(parameters: Parameters) -> None:
    best_of, seed = parameters.best_of or 1, parameters.seed
    if best_of > 1 and seed is not None:
        raise invalid("best_of", f"is {best_of} and seed is {seed}; only one can be given")
    _check_sampling(
        top_p=parameters.top_p,
        temperature=parameters.temperature,
        typical_p=parameters.typical_p,
        top_k=parameters.top_k,
        seed=seed,
    )


def _check_sampling(
    *,
    top_p: float | None,
    temperature: float | None,
    typical_p: float | None = None,
    top_k: int | None = None,
    seed: int | None,
) -> None:
    """Refuse values although they mean something."""
    for name, value in (("top_p", top_p), ("typical_p", typical_p)):
        if value is not None and not 0 < value < 1:
            raise invalid(name, f"is {value}; it must be above 0 and below 1")
    if temperature is not None and temperature <= 0:
        raise invalid("temperature", f"is {temperature}; it must be above 0")
    if top_k is not None and top_k <= 0:
        raise invalid("top_k", f"is {top_k}; it must be above 0")
    if seed is not None and seed < 0:
        raise invalid("seed", f"is {seed}; it must be at least 0")


def _vertex_parameters(given: Any) -> dict[str, Any]:
    """Read only the parameters that Vertex AI instances have. Sampling is always on."""
    names = ("max_new_tokens", "seed")
    return {name: given[name] for name in names if isinstance(given, dict) and name in given} | {"do_sample": True}


def _openai_error_events(error: QuireError) -> bytes:
    """An error in an OpenAI stream, with one status whatever its cause."""
    body = {"error": {"message": error.message, "http_status_code": 422}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE


STRICT_OPENAI = replace(
    OPENAI,
    error_body=TGIError,
    error_response=error_response,
    error_events=_openai_error_events,
    streams_refusals=True,
    uses_model_defaults=False,
    includes_stop=True,
    stop_search=EndAnchoredStops,
    length_first=True,
    read=read,
    completion_max_tokens=None,
    chat_finish_reasons=CHAT_FINISH_REASONS,
    completion_finish_reasons=CHAT_FINISH_REASONS | {Finish.END: "eos_token"},
    completion_unfinished="",
    repeats_role=True,
    has_details=False,
    fingerprint=f"{__version__}-native",
)
STRICT_TGI = replace(
    TGI,
    streams_refusals=True,
    uses_model_defaults=False,
    stop_search=EndAnchoredStops,
    length_first=True,
    openai=STRICT_OPENAI,
    check=_check,
    needs_prefill_setting=True,
    needs_properties=True,
    drops_details=True,
    vertex_parameters=_vertex_parameters,
)
