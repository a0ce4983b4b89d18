"""The types of all errors.

QuireError
├── InvalidRequest           the request itself is wrong; sending it again cannot help
│   ├── PromptTooLong        it can never fit
│   ├── TemplateFailed       the chat template cannot render it, or there is none
│   ├── ModelNotFound        it names a model that is not served
│   ├── Unauthorized         its API key is missing or wrong
│   ├── ForbiddenOrigin      a web page sends it that is not this server's own
│   ├── BodyTooLarge         its body has more bytes than the limit
│   ├── UnsupportedMediaType its body has a type or a coding that is not read
│   ├── ResponseNotFound     it names a response, or an item, that is not kept
│   ├── PreviousResponseNotFound  it continues one that is not kept
│   ├── NoSuchRoute          its path is unknown
│   └── WrongMethod          its path is known, its method is not
├── Overloaded               the queue is full; try again after `retry_after_s`
│   └── RateLimited          its API key has had its requests or tokens of this minute
├── DeadlineExceeded         the time it was given has passed
├── RequestFailed            the device work of this one request fails
├── EngineFailed             the engine cannot run any request
├── EngineStopped            the engine is shutting down
├── AddressUnavailable       the port to listen on is taken, or not allowed
├── OutputFailed             standard output cannot be written
├── StoreFailed              kept responses cannot be read or written
├── InvalidSetting           a setting is wrong, or what it asks for does not fit
└── ModelError               a model cannot be served
    ├── UnsupportedModel     its architecture, or an option of it, is not implemented
    ├── InvalidCheckpoint    its files are incomplete, damaged or contradictory
    ├── InvalidAdapter       an adapter is incomplete, damaged, of another model, or of a kind that is not implemented
    └── ModelUnavailable     its files cannot be fetched

Each has a `kind`, which clients see, and an HTTP `status`. A message names the value and the limit; `param` is the
path of the field that is wrong, where one is.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

MOST_LISTED = 20

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8


def shown(value: object) -> str:
    """The text of a value in a message, bounded whatever a file or a request holds."""
    return _SHORT.repr(value)


def listed(names: Sequence[str], between: str = ", ") -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return between.join(names[:MOST_LISTED]) + more


# An absolute path: within quotes with its spaces, else up to the first. Addresses, relative paths and fractions have
# something before the slash, or another slash behind it.
_PATH = re.compile(r"""(?<=['"])/(?![/\s])[^'"\n]+|(?<![\w./~'"-])/(?![/\s])[^\s'",]+""")


def without_folders(message: str) -> str:
    """`message` as clients may read it: of the machine's paths only the last name."""
    return _PATH.sub(_last_name, message)


def _last_name(path: re.Match[str]) -> str:
    name = path[0].rstrip("/").rpartition("/")[2]
    return path[0][path[0].rindex(name) :]


MAX_MESSAGE = 2000  # characters: messages repeat what clients sent


class QuireError(Exception):
    kind = "internal"
    status = 500
    headers: Mapping[str, str] = MappingProxyType({})  # of its answer, beside those of every answer

    def __init__(self, message: str, retry_after_s: float | None = None, *, param: str | None = None) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}…"
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s  # None where trying again does not help
        self.param = param  # "messages[0].role"; None where no field is to blame


class InvalidRequest(QuireError):
    kind = "validation"
    status = 422


class PromptTooLong(InvalidRequest):
    kind = "prompt_too_long"
    counts: tuple[int, int] | None = None  # tokens of the prompt and the limit, if these are the only cause


class TemplateFailed(InvalidRequest):
    kind = "template_error"


class ModelNotFound(InvalidRequest):
    kind = "model_not_found"
    status = 404


class Unauthorized(InvalidRequest):
    kind = "unauthorized"
    status = 401
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class ForbiddenOrigin(InvalidRequest):
    kind = "forbidden_origin"
    status = 403


class BodyTooLarge(InvalidRequest):
    kind = "body_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    kind = "unsupported_media_type"
    status = 415

    def __init__(self, message: str, **supported: str) -> None:
        """`supported`: the header that says what is read, as in `accept_encoding="identity"`."""
        super().__init__(message)
        self.headers = {name.replace("_", "-"): value for name, value in supported.items()}


class ResponseNotFound(InvalidRequest):
    kind = "response_not_found"
    status = 404


class PreviousResponseNotFound(InvalidRequest):
    kind = "previous_response_not_found"
    status = 400


class NoSuchRoute(InvalidRequest):
    kind = "not_found"
    status = 404


class WrongMethod(InvalidRequest):
    kind = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allowed: Iterable[str] = ()) -> None:
        """`allowed`: the methods that the path takes."""
        super().__init__(message)
        self.headers = {"allow": ", ".join(sorted(allowed))}


class Overloaded(QuireError):
    kind = "overloaded"
    status = 429


class RateLimited(Overloaded):
    kind = "rate_limit_exceeded"


class DeadlineExceeded(QuireError):
    kind = "deadline_exceeded"
    status = 504


class RequestFailed(QuireError):
    kind = "generation"
    status = 424


class EngineFailed(QuireError):
    kind = "engine_failed"
    status = 503


class EngineStopped(QuireError):
    kind = "engine_stopped"
    status = 503


ENGINES_FAILURES = (RequestFailed, EngineFailed, EngineStopped)  # what text-generation-inference calls "generation"


class AddressUnavailable(QuireError):
    kind = "address_unavailable"


class OutputFailed(QuireError):
    kind = "output"


class StoreFailed(QuireError):
    kind = "store_failed"
    status = 503


class InvalidSetting(QuireError):
    kind = "setting"


class ModelError(QuireError):
    kind = "model"


class UnsupportedModel(ModelError):
    kind = "unsupported_model"


class InvalidCheckpoint(ModelError):
    kind = "invalid_checkpoint"


class InvalidAdapter(ModelError):
    kind = "invalid_adapter"
    status = 400


class ModelUnavailable(ModelError):
    kind = "model_unavailable"


def time_limit(seconds: float | None) -> str:
    """The time that a whole request may take, as messages name it."""
    return f"the limit of {seconds:g} s, --request-timeout-s,"


def queue_limit(seconds: float | None) -> str:
    """The time that a request may wait for a slot, as messages name it."""
    return f"the limit of {seconds:g} s, --queue-timeout-s,"


def reason_of(error: Exception | None) -> str:
    """An error as clients may read it: those of libraries and defects are in the log only."""
    return error.message if isinstance(error, QuireError) else "an internal error; see the log"


def invalid(param: str, problem: str, kind: type[InvalidRequest] = InvalidRequest) -> InvalidRequest:
    """An error with the field's path and the `problem` as its message. The problem may begin with a colon."""
    return kind(f"{param}{problem}" if problem.startswith(":") else f"{param} {problem}", param=param)


def error_of(kind: str, message: str, retry_after_s: float | None = None) -> QuireError:
    """The error that another process reports, with its type."""
    return _ERROR_TYPES.get(kind, RequestFailed)(message, retry_after_s)


def _with_subtypes(error_type: type[QuireError]) -> list[type[QuireError]]:
    return [error_type, *(found for sub in error_type.__subclasses__() for found in _with_subtypes(sub))]


_ERROR_TYPES = {error_type.kind: error_type for error_type in _with_subtypes(QuireError)}
