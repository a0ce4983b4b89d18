"""Generation without a server: the same engine, in this process and without threads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from quire.config import Config
from quire.engine.build import Built, build_engine, make_plan
from quire.engine.messages import TokenLogprobs, Update
from quire.errors import InvalidRequest
from quire.files import Progress, progress_bar, silent
from quire.request import FinishReason, Request, SamplingParams
from quire.text.chat import ChatTemplates, load_chat_templates
from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer, load_tokenizer

Message = dict[str, Any]  # role, content, ... as the chat template wants it
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass
class Completion:
    """One continuation of a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    text: str
    finish_reason: str | None = None  # end, stop_token, stop_string, length
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to a completion."""

    request: int  # index of the prompt
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class LLM:
    """A model in this process.

    `LLM("default").generate("The sky is", max_tokens=8)` gives one `Completion` per prompt and sample. Settings are
    the fields of `quire.config.Config`.
    """

    def __init__(self, model: str = "default", *, progress: bool = True, **settings: Any) -> None:
        show: Progress = progress_bar if progress else silent
        self.plan = make_plan(Config(model=model, **settings), show)
        self._built: Built = build_engine(self.plan, show)
        self.engine = self._built.engine
        self.tokenizer: Tokenizer | None = None
        self._templates: ChatTemplates | None = None
        if self.plan.files.tokenizer is not None:
            self.tokenizer = load_tokenizer(self.plan.files.tokenizer)
            self._templates = load_chat_templates(
                self.plan.files.tokenizer, self.tokenizer.special_tokens, override=self.plan.config.chat_template
            )
        self._ids = count(1)
        self._show_bar = progress
        self._warm_up()

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's own files ask for; the most likely token where they say nothing."""
        said = self.plan.files.generation
        if not said.do_sample and said.temperature is None:
            return SamplingParams(temperature=0.0)
        fields = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        return SamplingParams(**{name: v for name in fields if (v := getattr(said, name)) is not None})

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None and bool(self._templates.names)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 128,
        stop: Sequence[str] = (),
        n: int = 1,
        seed: int = 0,
        ignore_end: bool = False,
        prompt_logprobs: int | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, n for each, in order. A prompt is a text, a list of token ids, or a chat."""
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        asked = [self._request(prompt, sampling, max_tokens, n, seed, ignore_end, prompt_logprobs) for prompt in batch]
        run = Run(self, batch, asked, stop)
        show = self._show_bar if progress is None else progress
        total, done = n * len(asked), 0
        with (progress_bar if show else silent)("Generating") as report:
            for delta in run:
                done += delta.finish_reason is not None
                report(done, total)
        return run.completions

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 128,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[Delta]:
        """One prompt's completion, piece by piece. Closing the iterator ends the request."""
        return iter(Run(self, [prompt], [self._request(prompt, sampling, max_tokens, 1, seed)], stop))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt; a chat is rendered by the model's template."""
        if isinstance(prompt, str):
            return tuple(self._need_tokenizer().encode(prompt))
        if is_chat(prompt):
            if self._templates is None:
                raise InvalidRequest(f"{self.plan.files.name} has no chat template")
            text = self._templates.select().render(list(prompt))  # type: ignore[arg-type]
            return tuple(self._need_tokenizer().encode(text, add_special_tokens=False))
        ids = tuple(prompt)
        limit = self.plan.model.vocab_size
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < limit:
                raise InvalidRequest(f"token id {token!r} is not between 0 and {limit - 1}")
        return ids  # type: ignore[return-value]

    def close(self) -> None:
        self._built.executor.close()

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        max_tokens: int,
        n: int,
        seed: int,
        ignore_end: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Request:
        ids = self.encode(prompt)
        room = self.plan.limits.max_sequence_tokens - len(ids)
        return Request(
            request_id=next(self._ids),
            prompt=ids,
            max_tokens=min(max_tokens, room) if room > 0 else max_tokens,
            sampling=sampling or self.default_sampling,
            seed=seed,
            samples=n,
            end_ids=self.plan.files.eos_token_ids,
            ignore_end=ignore_end,
            prompt_logprobs=prompt_logprobs,
        )

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.plan.files.name} has no tokenizer; give token ids")
        return self.tokenizer

    def _warm_up(self) -> None:
        with (progress_bar if self._show_bar else silent)("Compiling") as report:
            for share in self._built.executor.warm_up():
                report(int(share * 100), 100)


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


class Run:
    """Drives the engine until its requests are done, and puts their answers together."""

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], requests: list[Request], stop: Sequence[str]) -> None:
        self._engine = llm.engine
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._requests = requests
        self._open: dict[tuple[int, int], Answer] = {}
        for prompt, request in zip(prompts, requests, strict=True):
            for sample in range(request.samples):
                answer = Answer(request, llm.tokenizer, stop, continues=not is_chat(prompt))
                self._open[request.request_id, sample] = answer
        self._answers = list(self._open.values())

    @property
    def completions(self) -> list[Completion]:
        return [answer.completion for answer in self._answers]

    def __iter__(self) -> Iterator[Delta]:
        added: list[int] = []
        try:
            for request in self._requests:
                self._engine.add(request)
                added.append(request.request_id)
            while self._open:
                outcome = self._engine.step()
                for failure in outcome.failures:
                    if failure.request_id in self._index:
                        raise failure.error
                for update in outcome.updates:
                    if (update.request_id, update.sample) in self._open:
                        yield self._take(update)
        finally:
            for request_id in added:
                self._engine.abort(request_id)

    def _take(self, update: Update) -> Delta:
        key = update.request_id, update.sample
        answer = self._open[key]
        text = answer.take(update)
        reason = answer.completion.finish_reason
        if reason is not None:
            del self._open[key]
            if update.finish is None and not any(request_id == update.request_id for request_id, _ in self._open):
                self._engine.abort(update.request_id)  # a stop string, which the engine does not know of
        return Delta(self._index[update.request_id], update.sample, text, update.tokens, reason)


class Answer:
    """A completion in the making."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, stop: Sequence[str], continues: bool) -> None:
        self.completion = Completion(request.prompt, [], "")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=continues)
        self._stops = StopStrings(list(stop)) if stop else None
        if stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and the model has none")

    def take(self, update: Update) -> str:
        """Add what a step brought; returns the new text that is safe to show."""
        done = self.completion
        done.token_ids += update.tokens
        done.cached_tokens = update.cached_tokens
        if update.logprobs is not None:
            done.logprobs = (done.logprobs or []) + update.logprobs
        if update.prompt_logprobs is not None:
            done.prompt_logprobs = (done.prompt_logprobs or []) + update.prompt_logprobs
        text = self._text(update)
        done.text += text
        if done.finish_reason is None and update.finish is not None:
            done.finish_reason = str(update.finish)
        return text

    def _text(self, update: Update) -> str:
        if self._detokenizer is None:
            return ""
        shown = update.tokens[:-1] if update.finish is FinishReason.STOP_TOKEN else update.tokens
        text = self._detokenizer.push(shown)
        if update.finish is not None:
            text += self._detokenizer.flush()
        if self._stops is None:
            return text
        released = self._stops.push(text).text
        if update.finish is not None:
            released += self._stops.flush().text
        if self._stops.found is not None:
            self.completion.finish_reason = "stop_string"
        return released
