"""The answers to one HTTP request."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.errors import Overloaded, QuireError
from quire.ipc.messages import Update
from quire.request import Request
from quire.server.observe.request_record import RequestRecord
from quire.server.offload import Offload
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.open_prompt import OpenPrompt, TokenDelta
from quire.server.service.served_model import ServedModel
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from quire.server.observe.tracing import RequestTrace  # needs packages that most installations do not have

log = logging.getLogger(__name__)

Sink = Callable[[list[TokenDelta]], bool]  # writes all deltas at once; False: it cannot now


class StreamOwner(Protocol):
    """The service as a stream knows it."""

    model: ServedModel
    settings: ServerSettings
    offload: Offload
    platform: str

    def ended(self, prompt: OpenPrompt) -> None:
        """All samples of `prompt` are complete."""

    def forget(self, stream: "Stream") -> None:
        """`stream` is closed."""


class Stream:
    """The answers to one HTTP request, of all of its prompts and samples, in the order they come.

    Every prompt is read to its end or aborted by `close`. Owned by the event loop.
    """

    def __init__(self, service: StreamOwner, arrival: Arrival, max_buffered: int, is_counted: bool = True) -> None:
        self.service = service
        self.arrival = arrival
        self.is_counted = is_counted
        self.user: str | None = None
        self.has_status = False  # its client has been told 200
        self.num_sequences = 0  # counted against the worker's limit of open sequences
        self.num_charged = 0  # tokens of its prompts, to the limit of its key
        self.trace: RequestTrace | None = None
        self.pending: list[TokenDelta] = []
        self.prompts: list[OpenPrompt] = []
        self.times = arrival.times
        self.num_new = 0  # tokens of the step that is being applied
        self._num_live = 0
        self._max_buffered = max_buffered
        self.error: QuireError | None = None
        self._num_admitted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._admission: asyncio.Future[None] | None = None  # of a caller of `admission`
        self._sink: Sink | None = None
        self._closed = False

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.request.prompt) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.cached_tokens for prompt in self.prompts)

    @property
    def num_guesses(self) -> int:
        return sum(prompt.num_guesses for prompt in self.prompts)

    @property
    def right_guesses(self) -> Counter[int]:
        """The number of steps by how many of their guesses were right."""
        return sum((prompt.right_guesses for prompt in self.prompts), Counter())

    @property
    def is_over(self) -> bool:
        return not self._num_live

    def add(self, spec: GenerationSpec, request: Request) -> OpenPrompt:
        prompt = OpenPrompt(self.service.model.tokenizer, len(self.prompts), spec, request)
        self.prompts.append(prompt)
        self._num_live += 1
        return prompt

    @property
    def record(self) -> RequestRecord:
        """The record for metrics, logs and traces, once the request is over."""
        return RequestRecord(
            self.times,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_tokens,
            self.right_guesses,
            sum(prompt.request.max_tokens for prompt in self.prompts),
            self.is_over,
            self.error,
            self.user,
            self.arrival.request_id,
            self.arrival.key_name,
        )

    def wake(self) -> None:
        """The engine has sent messages. A step without a delta, as those within a prompt, wakes no reader."""
        if not self.pending and self._num_live and not self._closed:
            return
        sink, self._sink = self._sink, None
        if sink is not None and self._num_live and self._drain_to(sink):
            self._sink = sink
            return
        if len(self.pending) > self._max_buffered:
            unread, self.pending = len(self.pending), []
            self.fail(Overloaded(f"the client has not read {unread} tokens; {self._max_buffered} are kept"))
        self._rouse()

    def _drain_to(self, sink: Sink) -> bool:
        try:
            if not sink(self.pending):
                return False
        except Exception as defect:
            self.pending = []
            self.break_off(defect)
            return False
        self.pending = []
        return True

    def apply(self, prompt: OpenPrompt, update: Update) -> None:
        """Add a step's tokens of a prompt that the engine works on."""
        try:
            prompt.apply(update, self.pending)
        except Exception as defect:
            self.break_off(defect)
            return
        if not prompt.num_left:
            self._num_live -= 1
            self.service.ended(prompt)

    def break_off(self, defect: Exception) -> QuireError:
        """End this stream, and no other, after a defect of ours. Returns the error for its client, which `read` raises
        as well: what is wrong is in the log."""
        log.error("a request failed", exc_info=defect, extra={"request_id": self.arrival.request_id})
        error = QuireError("internal error; see the server log")
        self.fail(error)
        return error

    def broken_off(self, defect: Exception) -> QuireError:
        """Like `break_off`, for a caller that raises the error itself: the stream keeps no reference to it."""
        return self._handed_over(self.break_off(defect))

    def fail(self, error: QuireError) -> None:
        """A prompt failed, so the whole request fails."""
        if self.error is None:
            self.error = error
        self.close()

    def admit(self, prompt: OpenPrompt) -> None:
        """The engine has accepted a prompt."""
        if not prompt.is_admitted:
            prompt.is_admitted = True
            self._num_admitted += 1
        if self._num_admitted == len(self.prompts) and self._admission is not None and not self._admission.done():
            self._admission.set_result(None)

    async def admission(self) -> None:
        """Wait until the engine has accepted all prompts, or there is something to read."""
        if self.is_waiting and self._num_admitted < len(self.prompts):
            self._admission = asyncio.get_running_loop().create_future()
            await self._admission

    @property
    def is_waiting(self) -> bool:
        """There is nothing to read now, and there will be: deltas, an error or the end."""
        return not self.pending and self.error is None and self._num_live > 0 and not self._closed

    async def read(self, sink: Sink | None = None) -> list[TokenDelta]:
        """The deltas since the last call, waiting for some if there are none; empty once all is over.

        While it waits, deltas go to `sink` as long as that takes them, and the wait goes on. The last deltas of all
        are returned.
        """
        if not self.pending:
            if self.is_waiting:
                self._sink = sink
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if not self.pending and self.error is not None:
                raise self._handed_over(self.error)
        deltas, self.pending = self.pending, []
        return deltas

    def _handed_over(self, error: QuireError) -> QuireError:
        """`error`, no longer kept here: once raised it holds the frames that it passes, and they hold this stream."""
        self.error = None
        return error

    def close(self) -> None:
        """Abort the prompts that still run. The last thing to happen to a stream."""
        if self._closed:
            return
        self._closed = True
        self._sink = None  # it holds the answer that holds this stream
        self.times.ended_s = time.monotonic()
        self.service.forget(self)
        self._rouse()

    def _rouse(self) -> None:
        for waiter in (self._waiter, self._admission):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
