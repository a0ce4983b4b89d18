"""A front end of a crossing: what its requests were told."""

from dataclasses import dataclass, field, replace

from quire.core.plan import TokenLogprobs
from quire.engine.port import Port
from quire.ipc.messages import (
    Account,
    AdapterDone,
    AdapterTable,
    BegunWith,
    Event,
    Failed,
    Queued,
    Started,
    StepTrace,
    Submit,
)
from quire.request import FinishReason, Request


@dataclass
class Answer:
    """One sample of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Told:
    """One request, from its submission to its end."""

    request: Request
    sent_s: float
    answers: list[Answer]
    begun_with: BegunWith | None = None
    failed: Failed | None = None
    has_started: bool = False
    is_aborted: bool = False
    account: Account | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_aborted or self.failed is not None or all(one.finish is not None for one in self.answers)

    def resumed(self, now: float) -> Submit:
        """The command by which another engine goes on, as front ends send it."""
        request, folder = self.request, ""
        if self.has_started:
            request = replace(request, queue_timeout_s=None)
        if self.begun_with is not None:
            request, folder = replace(request, adapter_digest=self.begun_with.digest), self.begun_with.folder
        if request.prompt_logprobs is not None:
            if len(self.answers[0].prompt_logprobs) == len(request.prompt) - 1:
                request = replace(request, prompt_logprobs=None)
            else:
                self.answers[0].prompt_logprobs.clear()
        so_far = [None if one.finish is not None else list(one.tokens) for one in self.answers]
        return Submit(request, so_far, now - self.sent_s, folder)


class FrontEnd:
    """`port` is that of the engine that runs now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.port: Port
        self.is_broken = self.has_left = False
        self.told: dict[int, Told] = {}
        self.adapters = AdapterTable(0, {})

    @property
    def is_there(self) -> bool:
        return not (self.is_broken or self.has_left)

    def take(self, events: list[Event]) -> None:
        if self.is_broken:
            raise OSError("the pipe is broken")
        for event in events:
            self._take_one(event)

    def _take_one(self, event: Event) -> None:
        if isinstance(event, AdapterTable):
            self.adapters = event
        elif isinstance(event, AdapterDone):
            assert event.kind is None, event
        elif isinstance(event, StepTrace):
            assert all(self.told[one].request.traced for one in event.request_ids), "a request is traced unasked"
        elif isinstance(event, Failed):
            told = self.told[event.request_id]
            assert not told.has_ended or told.is_aborted, f"{event} comes after the end"
            told.failed = event
        elif isinstance(event, Queued):
            assert event.request_id in self.told, "an event went to the wrong front end"
        elif isinstance(event, Started):
            told = self.told[event.request_id]
            assert not told.answers[0].tokens or told.has_started, "tokens came before the start"
            told.has_started = True
        elif isinstance(event, BegunWith):
            told = self.told[event.request_id]
            assert told.begun_with is None, "a request begins with one adapter"
            told.begun_with = event
        elif isinstance(event, Account):
            assert self.told[event.request_id].request.timings, "an account comes unasked"
            self.told[event.request_id].account = event
        else:
            for update in event.updates:
                self._update(update)

    def _update(self, update) -> None:
        told = self.told[update.request_id]
        answer = told.answers[update.sample]
        assert told.failed is None, "a request went on after it had failed"
        assert answer.finish is None, "a sample went on after its end"
        answer.tokens += update.tokens
        answer.logprobs += update.logprobs or []
        answer.prompt_logprobs += update.prompt_logprobs or []
        answer.finish = update.finish
