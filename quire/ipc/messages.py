"""Messages between front ends and the engine: plain data, sent as msgpack between processes."""

import msgspec

# Parts of messages; the `as` exports them.
from quire.core.plan import Failure as Failure  # noqa: PLC0414
from quire.core.plan import TokenLogprobs as TokenLogprobs  # noqa: PLC0414
from quire.core.plan import Update as Update  # noqa: PLC0414
from quire.errors import QuireError
from quire.request import Request

PORT_SHIFT = 40  # a request id is its port's number above this many bits, which the port counts by itself


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: Request
    # Of a request that another engine began: the tokens of each sample so far, None for one that has ended.
    so_far: list[list[int] | None] | None = None
    waited_s: float = 0.0  # since its arrival, from which its deadlines count
    adapter_folder: str = ""  # from which that engine had read the adapter of `request.adapter_digest`


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request_id: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The updates of one step for the requests of one front end."""

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
    """Queueing and prefill work of a request with `timings`. Sent again when it has changed."""

    request_id: int
    blocked_s: dict[str, float]  # queue time by what kept the queue waiting; the rest passed during a step
    prefill_chunks: int
    prefill_tokens: int  # computed, also again after a preemption
    preemptions: int


class StepTrace(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step with traced requests of a front end. Sent before the events of the step.

    Times are seconds of the monotonic clock, which processes of one machine share.
    """

    step: int
    method: str
    num_sequences: int
    num_tokens: int
    begun_s: float
    collected_s: float  # its result arrived
    completed_s: float  # the result is applied
    worked: bool
    request_ids: list[int]  # traced requests in it, and traced requests that it ended with an error
    failed_ids: list[int]  # those of them that it ended with an error


class Queued(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine has accepted a request, and it has no slot yet. Requests with a slot get `Started` alone."""

    request_id: int


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request got its first slot, `queue_s` after it arrived. Sent before its tokens."""

    request_id: int
    queue_s: float


class BegunWith(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The adapter that a request has until its end, also when another one gets its name, and when another engine goes
    on with it. Sent when the engine accepts the request."""

    request_id: int
    digest: str
    folder: str


class AllResumed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front end has sent all requests that it brings from the engine before this one. Those that are missing are
    over, or another engine has them."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load an adapter from a folder under a name. Answered by `AdapterDone` with the same number."""

    number: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuse requests for an adapter from now on. Answered by `AdapterDone`."""

    number: int
    name: str


class SyncAdapters(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The adapters that a front end knows of, sent to an engine before requests: a new engine has only those of its
    settings."""

    version: int
    folders: dict[str, str]


class AdapterDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An adapter was loaded or unloaded, or could not be."""

    number: int
    kind: str | None = None  # of the error, if there was one
    message: str = ""


class AdapterTable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All adapters of an engine. Sent to a front end that connects, and to all of them after a change."""

    version: int
    folders: dict[str, str]  # by name


Command = Submit | Abort | AllResumed | LoadAdapter | UnloadAdapter | SyncAdapters
Event = Progress | Failed | Queued | Started | BegunWith | Account | StepTrace | AdapterDone | AdapterTable


class Described(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model, sent once its files are found: a front end can read its tokenizer while the weights load."""

    name: str
    tokenizer: str | None  # the path of its folder or file
    end_ids: tuple[int, ...]
    generation: dict[str, float | int | bool | None]  # default sampling of the model's files
    adapters: tuple[str, ...] = ()  # names of those that the engine has from its start


class Waiting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot begin yet, with the reason."""

    reason: str


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end's first message: the number that the ids of its requests begin with. No other front end has it.

    The front end chooses it, not the engine, so that a request keeps its id when another engine takes over.
    """

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine accepts requests."""

    max_total_tokens: int
    platform: str
    cache_tokens: int = 0  # that the prefix cache has room for
    max_guesses: int = 0  # of a sequence's tokens, in one step


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot get ready, or cannot continue."""

    kind: str
    message: str


DURATIONS_S = tuple(0.00015 * 1.5**k for k in range(35))  # upper bounds of the buckets in `Stats.steps`
BATCH_SIZES = tuple(range(1, 1025))  # and in `Stats.batch_sizes`


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Statistics of the engine, sent four times a second. Their absence shows a fault."""

    busy_s: float  # time that the step under way has taken
    waited_s: float  # time with work and without a finished step
    idle_s: float  # since the last step that finished
    num_running: int  # sequences with a slot
    num_slots: int
    num_waiting: int
    running_max_tokens: int  # that the running sequences may ever have, prompts included
    free_pages: int
    cached_pages: int
    num_pages: int
    max_total_tokens: int  # of all running sequences together
    counters: dict[str, int]
    steps: dict[str, list[int]]  # counts by duration, by kind of step
    step_seconds: dict[str, float]
    batch_sizes: list[int]  # counts by sequences that begin in a step
    batch_size_sum: int
    joined_by: dict[str, int]  # steps in which sequences joined running ones, by the rule that admitted them
    error: str | None
    step_limit_s: float | None  # watchdog timeout by the steps so far; None if there were none
    is_compiling: bool  # the step under way waited for a program to compile
    checking_s: float | None  # time that a check or a reset of the device has taken; None if there is none
    page_size: int  # tokens
    is_searching: bool  # only some requests run, to find the one that makes steps fail
    max_adapters: int = 0  # that can run together
    running_adapters: list[str] = []  # by name
    waiting_adapters: list[str] = []  # of sequences that wait

    @property
    def active_pages(self) -> int:
        """Pages that sequences use."""
        return self.num_pages - self.free_pages - self.cached_pages


class PromptBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hashes of the prefixes of a prompt that one front end sends an engine. The engine relays them to the others,
    which choose between several engines by it."""

    blocks: list[int]


ToFrontEnd = Event | Stats | PromptBlocks | Described | Waiting | Ready | Broken
ToEngine = Command | PromptBlocks | Hello
