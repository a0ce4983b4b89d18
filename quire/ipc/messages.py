"""What travels between front ends and the engine: plain data, as msgpack when it leaves the process."""

import msgspec

from quire.core.plan import Failure, TokenLogprobs, Update
from quire.errors import QuireError
from quire.request import Request

__all__ = [
    "PORT_SHIFT",
    "Abort",
    "Account",
    "Broken",
    "Command",
    "Counts",
    "Described",
    "Event",
    "Failed",
    "Failure",
    "Hello",
    "Others",
    "Progress",
    "Ready",
    "Started",
    "Stats",
    "StepTrace",
    "Submit",
    "ToEngine",
    "ToFrontEnd",
    "TokenLogprobs",
    "Update",
]

PORT_SHIFT = 40  # a request id is its port's number above so many bits of the port's own counting


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: Request
    # When another engine was at it: what each sample generated there, None for one that has ended. The rest follows
    # as if nothing had happened.
    so_far: list[list[int] | None] | None = None
    waited_s: float = 0.0  # since its arrival, from which its deadlines count


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request_id: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step meant for the requests of one front end."""

    updates: list[Update]


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that ends without an answer, or was refused."""

    request_id: int
    kind: str
    status: int
    message: str
    retry_after_s: float | None = None

    @classmethod
    def from_error(cls, request_id: int, error: QuireError) -> "Failed":
        return cls(request_id, error.kind, error.status, error.message, error.retry_after_s)


class Account(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How a request with `timings` has fared so far. Comes again when it has changed."""

    request_id: int
    queue_s: float  # until it got its first slot
    blocked_s: dict[str, float]  # of that, by what kept the queue waiting; the rest went by during a step
    prefill_chunks: int
    prefill_tokens: int  # computed, also again after a preemption
    preemptions: int


class StepTrace(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step with traced requests of a front end. Comes before the events of the step.

    Times are seconds of the monotonic clock, which processes of one machine share.
    """

    step: int
    method: str
    num_sequences: int
    num_tokens: int
    begun_s: float
    collected_s: float  # its result was there
    completed_s: float  # the result was taken in, and what is complete has left the batch
    worked: bool
    request_ids: list[int]  # the traced ones in it, and those that it ended with an error
    failed_ids: list[int]  # of them, those that it ended with an error


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request got its first slot, `queue_s` after it arrived. Comes before its tokens."""

    request_id: int
    queue_s: float


Command = Submit | Abort
Event = Progress | Failed | Started | Account | StepTrace


class Described(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the model is, once its files are found: a front end can read its tokenizer while the weights load."""

    name: str
    tokenizer: str | None  # the path of its folder or file
    end_ids: tuple[int, ...]
    generation: dict[str, float | int | bool | None]  # sampling that the files ask for


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end's first word: the number that its requests' ids begin with, which no other front end has.

    Its own and not the engine's to choose, so that a request has one id for as long as it lives, in one engine or more.
    """

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine takes requests."""

    max_total_tokens: int
    platform: str


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine will not get ready, or cannot go on."""

    kind: str
    message: str


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the engine is doing. Comes several times a second, so its absence says something too."""

    busy_s: float  # how long the step now under way has taken
    longest_step_s: float
    idle_s: float  # since the last step that finished
    num_running: int
    num_waiting: int
    running_max_tokens: int  # that the running sequences may ever have, prompts included
    free_pages: int
    cached_pages: int
    num_pages: int
    max_total_tokens: int  # of all that run together
    counters: dict[str, int]
    steps: dict[str, list[int]]  # counts by duration, by kind of step
    step_seconds: dict[str, float]
    batch_sizes: list[int]  # counts by rows that begin in a step
    batch_size_sum: int
    joined_by: dict[str, int]  # steps in which sequences began beside others that ran, by the rule that let them
    error: str | None
    step_limit_s: float | None  # how long a step may take by what others took; None when there were none
    is_compiling: bool  # the step under way had to wait for a program
    checking_s: float | None  # how long the device has been checked, or set up again


class Counts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one front end has counted, for the others: whichever is asked for metrics answers for all."""

    numbers: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]  # counts by bucket, and the sum
    failures: dict[str, int]


class Others(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the other front ends have counted."""

    counts: list[Counts]


ToFrontEnd = Event | Stats | Others | Described | Ready | Broken
ToEngine = Command | Counts | Hello
