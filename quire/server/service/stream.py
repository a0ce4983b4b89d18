"""What one HTTP request hears of its prompts."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.errors import Overloaded, QuireError
from quire.ipc.messages import Account, Submit, TokenLogprobs, Update
from quire.request import FinishReason, Request
from quire.server.api.tgi.end_anchored_stops import EndAnchoredStops
from quire.server.observe.request_record import RequestRecord
from quire.server.offload import Offload
from quire.server.service.arrival import Arrival
from quire.server.service.served_model import ServedModel
from quire.server.settings import ServerSettings
from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.server.observe.tracing import RequestTrace  # needs packages that most installations do without

log = logging.getLogger(__name__)


class Ending(StrEnum):
    """Why a sample ended."""

    END = "end"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


_ENDINGS = {
    FinishReason.END: Ending.END,
    FinishReason.STOP_TOKEN: Ending.STOP_TOKEN,
    FinishReason.LENGTH: Ending.LENGTH,
}


_new_tuple = tuple.__new__


class Delta(NamedTuple):
    """One token of one sample, and the text it releases; at the end of a sample the token may be missing."""

    prompt: int  # which of the request's prompts
    sample: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    ending: Ending | None


# Takes deltas at once, all of them, or says that it cannot now.
Sink = Callable[[list[Delta]], bool]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a request. `request` goes to the engine, under an id that the service chooses."""

    request: Request
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    as_tgi: bool = False  # stop strings are seen at the ends of tokens only, and after the limit


class Stops(Protocol):
    """Looks for stop strings."""

    def push(self, text: str) -> tuple[str, str | None]:
        """What of the text may be shown, and the string that was found."""

    def flush(self) -> tuple[str, str | None]:
        """The same, once no more text comes."""


def _new_stops(asked: "Asked") -> Stops:
    if asked.as_tgi:
        return EndAnchoredStops(asked.stop)
    return StopStrings(asked.stop, include=asked.include_stop)


class Sample:
    """One continuation of one prompt, as text."""

    __slots__ = ("detokenizer", "ending", "num_beside", "stop", "stops", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Stops | None) -> None:
        self.detokenizer = detokenizer
        self.stops = stops
        self.tokens: list[int] = []
        self.num_beside = 0  # tokens that came in one step with another before them
        self.ending: Ending | None = None
        self.stop: str | int | None = None  # the string or token that ended it


class Prompt:
    """One prompt in the engine. Makes deltas of what the engine says of it.

    It does not know its stream, which knows it: in a circle they would stay until the garbage collector comes.
    """

    def __init__(self, tokenizer: Tokenizer, index: int, asked: Asked, request: Request) -> None:
        self.request = request
        self.cached_tokens = 0
        self.accounts: list[Account] = []  # as each engine last told, where timings are wanted
        self._is_with_another = False  # than the one that told last
        self.logprobs: list[TokenLogprobs] = []  # of the prompt's own tokens after the first, where asked for
        self.index = index
        self._shows_stop = asked.include_stop
        self._as_tgi = asked.as_tgi
        self._is_plain = not asked.stop and request.prompt_logprobs is None
        self.samples = [
            Sample(
                Detokenizer(tokenizer, skip_special_tokens=asked.skip_special_tokens, continues=True),
                _new_stops(asked) if asked.stop else None,
            )
            for _ in range(request.samples)
        ]
        self.num_left = request.samples

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def resumed(self, spent_s: float) -> Submit:
        """What another engine needs in order to go on, `spent_s` after the request came."""
        self._is_with_another = True
        request = self.request
        if self.num_tokens:
            request = replace(request, queue_timeout_s=None)  # it has had its slot
        if request.prompt_logprobs is not None:
            if len(self.logprobs) == len(request.prompt) - 1:
                request = replace(request, prompt_logprobs=None)  # all of them have come
            else:
                self.logprobs.clear()
        so_far = [None if sample.ending is not None else sample.tokens for sample in self.samples]
        return Submit(request, so_far, spent_s)

    def note(self, account: Account) -> None:
        if self.accounts and not self._is_with_another:
            self.accounts.pop()
        self.accounts.append(account)
        self._is_with_another = False

    def take(self, update: Update, pending: list[Delta]) -> None:
        """Turn a step's tokens into deltas in `pending`, up to the one that completes a stop string."""
        _, number, tokens, finish, cached_tokens, logprobs, prompt_logprobs = update
        sample = self.samples[number]
        if finish is None and self._is_plain and logprobs is None and sample.tokens:
            if sample.ending is not None:
                return
            if len(tokens) > 1:
                sample.num_beside += len(tokens) - 1
            push_one = sample.detokenizer.push_one
            sample.tokens += tokens
            # Most tokens take this way.
            pending += [_new_tuple(Delta, (self.index, number, push_one(token), token, None, None)) for token in tokens]
            return
        if number == 0 and not sample.tokens:  # the others share what the first computes, and so does another engine
            self.cached_tokens = cached_tokens
        if prompt_logprobs and number == 0:
            self.logprobs += prompt_logprobs
        if sample.ending is not None:
            return
        last = len(tokens) - 1
        if last > 0:
            sample.num_beside += last
        for position, token in enumerate(tokens):
            sample.tokens.append(token)
            ending: Ending | None = None
            if finish is not None and position == last:
                ending = _ENDINGS[finish] if not self._is_limit(sample) else Ending.LENGTH
                text = self._last_text(sample, token, ending)
            else:
                text = sample.detokenizer.push((token,))
            if sample.stops is not None and not self._is_limit(sample):
                text, stopped = self._search(sample, text, ending is not None)
                if stopped:
                    ending = Ending.STOP_STRING
            pending.append(
                Delta(self.index, number, text, token, None if logprobs is None else logprobs[position], ending)
            )
            if ending is not None:
                self._end(sample, ending, token)
                return
        if finish is not None:  # and no token came with it
            ending = _ENDINGS[finish]
            pending.append(Delta(self.index, number, "", None, None, ending))
            self._end(sample, ending, None)

    def _is_limit(self, sample: Sample) -> bool:
        """text-generation-inference looks at the length first, and then at nothing else."""
        return self._as_tgi and len(sample.tokens) >= self.request.max_tokens

    def _last_text(self, sample: Sample, token: int, ending: Ending) -> str:
        """What the last token adds: the token that ends a sample is not part of its text."""
        hidden = ending is Ending.END or (ending is Ending.STOP_TOKEN and not self._shows_stop)
        text = "" if hidden else sample.detokenizer.push((token,))
        return text + sample.detokenizer.flush()

    def _search(self, sample: Sample, text: str, is_last: bool) -> tuple[str, bool]:
        assert sample.stops is not None
        released, stop = sample.stops.push(text)
        if stop is None and is_last:
            rest, stop = sample.stops.flush()
            released += rest
        sample.stop = stop
        return released, stop is not None

    def _end(self, sample: Sample, ending: Ending, token: int | None) -> None:
        sample.ending = ending
        if ending is Ending.STOP_TOKEN:
            sample.stop = token
        self.num_left -= 1


class StreamOwner(Protocol):
    """The service as a stream knows it."""

    model: ServedModel
    settings: ServerSettings
    offload: Offload
    platform: str

    def ended(self, prompt: Prompt) -> None:
        """All samples of `prompt` are complete."""

    def forget(self, stream: "Stream") -> None:
        """`stream` is closed."""


class Stream:
    """The answers to one HTTP request, of all of its prompts and samples, in the order they come.

    Everything submitted is heard to its end or aborted by `close`. Owned by the event loop.
    """

    def __init__(self, service: StreamOwner, arrival: Arrival, max_buffered: int, is_counted: bool = True) -> None:
        self.service = service
        self.arrival = arrival
        self.is_counted = is_counted
        self.user: str | None = None
        self.num_sequences = 0  # places that it takes of those that one worker has
        self.trace: RequestTrace | None = None
        self.pending: list[Delta] = []
        self.prompts: list[Prompt] = []
        self.times = arrival.times
        self.num_new = 0  # tokens of the step that is being taken in
        self._num_live = 0
        self._max_buffered = max_buffered
        self.error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None
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
    def is_over(self) -> bool:
        return not self._num_live

    def add(self, asked: Asked, request: Request) -> Prompt:
        prompt = Prompt(self.service.model.tokenizer, len(self.prompts), asked, request)
        self.prompts.append(prompt)
        self._num_live += 1
        return prompt

    @property
    def record(self) -> RequestRecord:
        """What observers see of it once it is over."""
        return RequestRecord(
            self.times,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_tokens,
            sum(prompt.request.max_tokens for prompt in self.prompts),
            self.is_over,
            self.error,
            self.user,
        )

    def wake(self) -> None:
        """The engine has said something. A step that brought no delta, as those within a prompt, wakes no reader."""
        if not self.pending and self._num_live and not self._closed:
            return
        sink, self._sink = self._sink, None
        if sink is not None and self._num_live and self._poured(sink):
            self._sink = sink
            return
        if len(self.pending) > self._max_buffered:
            unread, self.pending = len(self.pending), []
            self.fail(Overloaded(f"the client has not read {unread} tokens; {self._max_buffered} are kept"))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _poured(self, sink: Sink) -> bool:
        try:
            if not sink(self.pending):
                return False
        except Exception:  # a defect of ours, which the other streams of this step have nothing to do with
            log.exception("a stream cannot be written")
            self.pending = []
            self.fail(QuireError("internal error; see the server log"))
            return False
        self.pending = []
        return True

    def take(self, prompt: Prompt, update: Update) -> None:
        """What a step has for a prompt of it, which is among those that the engine works on."""
        prompt.take(update, self.pending)
        if not prompt.num_left:
            self._num_live -= 1
            self.service.ended(prompt)

    def fail(self, error: QuireError) -> None:
        """One prompt of it fails, and so does the whole."""
        if self.error is None:
            self.error = error
        self.close()

    async def read(self, sink: Sink | None = None) -> list[Delta]:
        """What has come since the last call, after waiting for it if need be; empty once all is over.

        What comes while it waits goes into `sink` as long as that takes it; it waits on then. The last deltas of
        all are returned.
        """
        if not self.pending:
            if self.error is None and self._num_live and not self._closed:
                self._sink = sink
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if not self.pending and self.error is not None:
                raise self._handed_over(self.error)
        deltas, self.pending = self.pending, []
        return deltas

    def _handed_over(self, error: QuireError) -> QuireError:
        """`error`, kept here no longer: once raised it keeps the frames that it passes, and they keep this stream."""
        self.error = None
        return error

    def close(self) -> None:
        """Abort what still runs. The last thing to happen to a stream, however it went."""
        if self._closed:
            return
        self._closed = True
        self.times.ended_s = time.monotonic()
        self.service.forget(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
