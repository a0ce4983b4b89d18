"""The Python API."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from quire.engine.building.build import Built, build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.garbage_collection import freeze_gc
from quire.errors import InvalidRequest, QuireError, invalid
from quire.files.progress import Progress, progress_bar, share_bar, silent
from quire.grammar.answers import AnswerRules
from quire.grammar.checking import GrammarChecking
from quire.grammar.lark import mark_tokens
from quire.llm.adapters import as_setting
from quire.llm.completion import Completion, CompletionBuilder, Delta
from quire.llm.engine_stepper import EngineStepper
from quire.llm.prompts import Prompt, as_batch, as_ids, for_each, is_chat
from quire.llm.run import BatchItem, Run
from quire.request import Grammar, GrammarKind, Request, SamplingParams
from quire.seeds import Seeds
from quire.settings.config import Config
from quire.text.answer_parts import PLAIN, AnswerForm
from quire.text.chat import ChatTemplates, load_chat_templates
from quire.text.conversation import render_conversation
from quire.text.stop_strings import MAX_STOPS, check_stops
from quire.text.thinking import thinking_of
from quire.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


class LLM:
    """A model in this process, for any number of threads: their prompts run together.

    `LLM("default").generate("The sky is", max_tokens=8)` gives one `Completion` for each prompt and sample. Settings
    are the fields of `quire.Config`, which can be given in place of the name.

    An interrupt (Ctrl-C) ends the answers under way of the main thread and, where other threads have none, empties the
    prefix cache; the object can be used again.
    """

    def __init__(
        self,
        model: str | Config = "default",
        *,
        adapters: Mapping[str, str | Path] | None = None,
        progress: bool = True,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        """`adapters`: folders of LoRA adapters, by the names that `generate` knows them by. `seed`: prompts without one
        of their own get the first, second, … of those that follow from it; None draws one for each."""
        self._files_bar: Progress = progress_bar if progress else silent
        self._share_bar: Progress = share_bar if progress else silent
        if adapters:
            settings["lora_adapters"] = as_setting(adapters)
        config = replace(model, **settings) if isinstance(model, Config) else Config(model=model, **settings)
        self.deployment = plan_deployment(config, self._files_bar)
        self.tokenizer: Tokenizer | None = None
        self._templates: ChatTemplates | None = None
        if self.deployment.files.tokenizer is not None:
            self.tokenizer = load_tokenizer(self.deployment.files.tokenizer)
            self._templates = load_chat_templates(
                self.deployment.files.tokenizer,
                self.tokenizer.special_tokens,
                override=self.deployment.config.chat_template,
            )
        self._built: Built = build_engine(self.deployment, self._files_bar)
        self.engine = self._built.engine
        self._stepper = EngineStepper(self.engine)
        self._grammar_checking = GrammarChecking()
        self._ids = count(1)
        self._seeds = Seeds(seed)
        self._is_fresh = True  # no prompt came yet
        if self.deployment.config.compile_ahead:
            self._compile(self._built.warm_up())
        freeze_gc()  # a search for cycles among it takes 100 ms

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling that the model's files state; the most likely token where they state none."""
        said = self.deployment.files.generation
        if not said.do_sample and said.temperature is None:
            return SamplingParams(temperature=0.0)
        fields = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        return SamplingParams(**{name: v for name in fields if (v := getattr(said, name)) is not None})

    @property
    def has_chat_template(self) -> bool:
        """True if a prompt can be a chat, a list of messages."""
        return self._templates is not None and bool(self._templates.names)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | Sequence[int] | None = 128,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        n: int = 1,
        seed: int | None = None,
        ignore_end: bool = False,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, n for each, in order.

        A prompt is a text, a list of token ids, or a chat (a list of messages); `prompts` is one or a list of them.
        `sampling`, `max_tokens` and `adapter` are for all prompts or a list with one for each; None takes what the
        model's files ask for, as many tokens as fit, and no adapter. An answer also ends where prompt and answer reach
        the longest sequence there can be. A seed gives the same answers again; on a GPU, or a CPU without the native
        library, only among the same prompts. None takes the next one of `LLM(seed=…)`, or a random one, for each
        prompt. A `grammar` is what every answer follows: `json_schema({...})` or `regex("...")`; in chats with a model
        that thinks, after its thinking.

        A prompt that cannot be completed does not stop the others: its completions carry the `error`, and it is logged.
        """
        batch = as_batch(prompts)
        fields = {"min_tokens": min_tokens, "ignore_end": ignore_end, "prompt_logprobs": prompt_logprobs}
        items = self._items(batch, sampling, max_tokens, stop, stop_ids, n, seed, grammar, adapter, fields)
        show = self._share_bar if progress is None else (share_bar if progress else silent)
        done, total = 0, n * len(items)
        with self._stepper.call():
            self._prepare(items)
            with show("Generating") as report, closing(iter(Run(self._stepper, items, _log_failure))) as deltas:
                for delta in deltas:
                    done += delta.finish_reason is not None
                    report(done, total)
        return [answer.completion for item in items for answer in item.answers]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | Sequence[int] | None = 128,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        n: int = 1,
        seed: int | None = None,
        ignore_end: bool = False,
        grammar: Grammar | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[Delta]:
        """Like `generate`, with each completion piece by piece. Leaving or closing the iterator ends what is not done.

        Several may be open at the same time. The first failure is raised when the other prompts are done.
        """
        batch = as_batch(prompts)
        fields = {"min_tokens": min_tokens, "ignore_end": ignore_end}
        items = self._items(batch, sampling, max_tokens, stop, stop_ids, n, seed, grammar, adapter, fields)
        return self._stream(items)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt; a chat is rendered by the model's template, and special tokens that are written
        out in its messages are plain text."""
        return self._encode(prompt)[0]

    def _encode(self, prompt: Prompt) -> tuple[tuple[int, ...], AnswerForm]:
        """The token ids of a prompt, and the form of its answers."""
        if isinstance(prompt, str):
            return tuple(self._need_tokenizer().encode(prompt)), PLAIN
        if not is_chat(prompt):
            return as_ids(prompt, self.deployment.model.vocab_size), PLAIN  # type: ignore[arg-type]
        if not self.has_chat_template or self._templates is None:
            raise InvalidRequest(f"{self.deployment.files.name} has no chat template")
        tokenizer, template = self._need_tokenizer(), self._templates.select()
        rendered = render_conversation(template, tokenizer.shield, list(prompt))
        thinking = thinking_of(template.source)
        is_opened = thinking is not None and thinking.is_open_at_end_of(rendered.text)
        return tuple(tokenizer.encode_prompt(rendered)), AnswerForm(thinking, begins_in_thinking=is_opened)

    def close(self) -> None:
        """End the threads and free the pages of the cache. The object, and iterators of it that are open, cannot be
        used afterwards; raises while another thread generates."""
        self._stepper.end()
        self._grammar_checking.close()
        self._built.executor.close()

    def _stream(self, items: list[BatchItem]) -> Iterator[Delta]:
        self._prepare(items)
        failures: list[QuireError] = []
        yield from Run(self._stepper, items, lambda index, error: failures.append(error))
        if failures:
            raise failures[0]

    def _prepare(self, items: list[BatchItem]) -> None:
        """Compile the programs of a single first prompt in parallel; later programs are compiled on use."""
        self._stepper.refuse_if_ended()
        if not self._is_fresh:
            return
        with self._stepper.turn():
            first, self._is_fresh = self._is_fresh, False
            if first and not self.deployment.config.compile_ahead and len(items) == 1 and items[0].request is not None:
                self._compile(self._built.executor.prepare(len(items[0].request.prompt)))

    def _compile(self, shares: Iterator[float]) -> None:
        if next(shares, None) is not None:
            with self._share_bar("Compiling") as report:
                for share in shares:
                    report(int(share * 100), 100)

    def _items(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int | Sequence[int] | None,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        n: int,
        seed: int | None,
        grammar: Grammar | None,
        adapter: str | Sequence[str | None] | None,
        fields: dict[str, Any],
    ) -> list[BatchItem]:
        """Raises errors that concern all prompts; an error of one prompt becomes its own. `fields` are a request's."""
        self._stepper.refuse_if_ended()
        if n < 1:
            raise invalid("n", f"is {n}; it must be at least 1")
        if isinstance(stop, str):
            stop = [stop]
        check_stops(stop, MAX_STOPS)
        if grammar is not None:
            self._grammar_checking.refuse("grammar", grammar)
        items = []
        samplings = for_each("sampling", sampling, len(prompts))
        limits = for_each("max_tokens", max_tokens, len(prompts))
        names: list[str | None] = for_each("adapter", adapter, len(prompts))
        for prompt, chosen, limit, name in zip(prompts, samplings, limits, names, strict=True):
            ids: tuple[int, ...] = ()
            form, request, error = PLAIN, None, None
            try:
                ids, form = self._encode(prompt)
                room = self.deployment.limits.max_sequence_tokens - len(ids)
                most = max(room, 1) if limit is None else min(limit, room) if room > 0 else limit
                request = Request(
                    request_id=next(self._ids),
                    prompt=ids,
                    max_tokens=most,
                    sampling=chosen or self.default_sampling,
                    seed=self._seeds.draw() if seed is None else seed,
                    samples=n,
                    end_ids=self.deployment.files.eos_token_ids,
                    stop_ids=tuple(stop_ids),
                    grammar=self._after_thinking(grammar, form),
                    adapter=name,
                    **fields,
                )
            except QuireError as refusal:
                error = refusal
            continues = not is_chat(prompt)
            least = 0 if request is None else request.min_tokens
            answers = [
                CompletionBuilder(ids, self.tokenizer, stop, continues, form, min_tokens=least) for _ in range(n)
            ]
            items.append(BatchItem(request, error, answers))
        return items

    def _after_thinking(self, grammar: Grammar | None, form: AnswerForm) -> Grammar | None:
        """The grammar of an answer that may begin with thinking, and then follows `grammar`."""
        if grammar is None or grammar.kind is GrammarKind.TOKENS or form.thinking is None:
            return grammar
        rules = AnswerRules(plain=grammar, thinking=form.thinking, is_opened=form.begins_in_thinking)
        marks = mark_tokens(self._need_tokenizer(), form.marks)
        return replace(rules.grammar(marks), thinking_budget=grammar.thinking_budget)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.deployment.files.name} has no tokenizer; give token ids")
        return self.tokenizer


def _log_failure(index: int, error: QuireError) -> None:
    log.warning("prompt %d has no answer: %s", index, error.message)
