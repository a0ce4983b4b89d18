"""What travels between front ends and the engine: plain data, as msgpack when it leaves the process."""

import msgspec

from quire.core.plan import Failure, TokenLogprobs, Update
from quire.errors import QuireError
from quire.request import Request

__all__ = [
    "Abort",
    "Account",
    "Command",
    "Event",
    "Failed",
    "Failure",
    "Progress",
    "StepTrace",
    "Submit",
    "TokenLogprobs",
    "Update",
]


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


Command = Submit | Abort
Event = Progress | Failed | Account | StepTrace
