"""Crossings on tiny models, whose answers are those of a plain engine in which a request runs alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.core.limits import Limits
from quire.core.plan import StepPlan, StepResult, TokenLogprobs
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.executor import Executor, Pending
from quire.executor.executor import JaxExecutor
from quire.executor.shapes import Shapes
from quire.grammar.answers import AnswerRules
from quire.grammar.lark import mark_tokens
from quire.grammar.matcher import Grammars
from quire.models.adapters import AdapterReader, AdapterSizes
from quire.request import Grammar, GrammarKind, Request, ThinkingBudget, regex
from quire.text.thinking import ThinkingFormat
from quire.text.tokenizer import Tokenizer
from tests.crossings.bench import Faults
from tests.crossings.capability import Layout
from tests.crossings.engine_setup import ADAPTER_SLOTS, GUESSES, HOST_PAGES, MAX_TOKENS, PAGE_SIZE, EngineSetup
from tests.crossings.front_end import Answer
from tests.crossings.layouts import SNAPSHOTS
from tests.crossings.table import TABLE
from tests.engine.toy_grammars import FORCING
from tests.executor.rig import Rig, quickly_compiled
from tests.fake_executor import NAN
from tests.models.adapter_files import write_adapter
from tests.tiny_chat_model import byte_tokenizer

END = 256  # of the byte tokenizer
VOCABULARY = 300
NUM_SLOTS, MAX_PREFILL = 4, 16
RANK = 4
NEAR = 1e-3  # of two log-probabilities


class FaultyExecutor:
    """Calls what may raise before each step, as the fake executor does. A step that fails loses the device's state."""

    def __init__(self, inner: JaxExecutor, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Pending:
        self._prompts |= {start.slot: start.prompt for start in plan.started}
        prompts = [self._prompts[chunk.slot] for chunk in plan.chunks]
        self._may_fail(partial(self._faults.at_submit, plan, prompts))
        pending = self._inner.submit(plan)
        return FaultyStep(pending, prompts, lambda: self._may_fail(partial(self._faults.at_result, plan, prompts)))

    def _may_fail(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            for array in jax.tree.leaves(self._inner._state):
                array.delete()
            raise


class FaultyStep:
    def __init__(self, pending: Pending, prompts: list[tuple[int, ...]], may_fail: Callable[[], None]) -> None:
        self._pending = pending
        self._prompts = prompts
        self._may_fail = may_fail

    def sample(self, masks: dict[int, bytes]) -> None:
        self._pending.sample(masks)

    def result(self) -> StepResult:
        self._may_fail()
        result = self._pending.result()
        failed = {row: "the logits of this row are not numbers" for row, one in enumerate(self._prompts) if NAN in one}
        return result._replace(failed=failed) if failed else result


class Models:
    """Tiny models, each compiled when it is first used."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rigs: dict[tuple[Any, ...], Rig] = {}

    def close(self) -> None:
        for rig in self._rigs.values():
            rig.executor.close()

    @staticmethod
    def key(setup: EngineSetup) -> tuple[Any, ...]:
        """Setups with the same one have the same numbers."""
        return setup.layout, setup.guesses == "draft", setup.quantize, setup.page_dtype

    def rig(self, setup: EngineSetup) -> Rig:
        key = self.key(setup)
        if key not in self._rigs:
            self._rigs[key] = self._new(setup)
        return self._rigs[key]

    def adapters(self, setup: EngineSetup) -> Path:
        """The folder of those for a layout."""
        folder = self._root / setup.layout.replace(" ", "-")
        if not folder.exists():
            for number, seed in (("1", 1), ("2", 2), ("3", 3), ("77", 4)):
                write_adapter(folder / number, self.rig(setup).model, seed=seed, rank=2 + seed % 3)
        return folder

    @staticmethod
    def _new(setup: EngineSetup) -> Rig:
        layout = TABLE[setup.layout]
        assert isinstance(layout, Layout)
        dtype = "bfloat16" if setup.quantize == "int8" else "float32"
        can_guess = not setup.has_snapshots
        shapes = Shapes(
            num_pages=400,
            page_size=PAGE_SIZE,
            num_slots=NUM_SLOTS,
            max_prefill_tokens=MAX_PREFILL,
            max_sequence_tokens=MAX_TOKENS,
            min_tokens=4,
            num_groups=len(setup.page_groups),
            guesses=GUESSES if can_guess else 0,
            step_guesses=NUM_SLOTS * GUESSES if can_guess else 0,
            num_snapshots=SNAPSHOTS["snapshots"] if setup.has_snapshots else 0,
            adapters=AdapterSizes(ADAPTER_SLOTS, RANK, dtype),
            page_dtype=setup.page_dtype,
        )
        draft = None
        if setup.guesses == "draft":
            plain = TABLE["full attention"]
            assert isinstance(plain, Layout)
            draft = plain.model
        with quickly_compiled():
            return Rig(
                layout.model, shapes, quantize=setup.quantize, draft_config=draft,
                num_host_pages=HOST_PAGES if can_guess else 0,
            )  # fmt: skip


class ModelBench:
    replacement = "77"

    def __init__(self, models: Models) -> None:
        self._models = models
        self._answers: dict[tuple[Any, ...], list[Answer]] = {}

    def close(self) -> None:
        pass

    def between_turns(self) -> None:
        pass

    def limits(self, setup: EngineSetup) -> Limits:
        rig = self._models.rig(setup)
        return setup.as_limits(page_groups=rig.executor.programs.compiler.layout.groups)

    def engine(self, setup: EngineSetup, clock: Callable[[], float], faults: Faults) -> Engine:
        rig = self._models.rig(setup)
        rig.executor.reset()
        rig.executor.adapters.clear()
        executor: Executor = FaultyExecutor(rig.executor, faults)
        sizes = rig.shapes.adapters
        engine = Engine(
            Scheduler(self.limits(setup), clock, rig.model.prefix_key, rig.model.switch_length),
            executor,
            setup.lookahead,
            grammars(),
            max_burst_s=setup.max_burst_s,
            max_step_s=setup.max_step_s,
            clock=clock,
            read_adapter=AdapterReader(rig.model, sizes.rank, jnp.dtype(sizes.dtype)) if setup.adapters else None,
        )
        if setup.adapters:
            engine.adapters.root = self._models.adapters(setup)
            for number, name in enumerate(setup.adapters, start=1):
                engine.adapters.load(name, str(engine.adapters.root / str(number)))
        return engine

    def translated(self, request: Request) -> Request:
        if request.grammar is None or request.grammar.kind is GrammarKind.TOKENS:
            return request
        return replace(request, grammar=_grammar(request.grammar), end_ids=(END,))

    def expected(self, setup: EngineSetup, request: Request, sample: int, folder: str | None) -> Answer:
        key = self._models.key(setup), repr(request), folder
        if key not in self._answers:
            self._answers[key] = self._answered_alone(setup, request, folder)
        return self._answers[key][sample]

    def _answered_alone(self, setup: EngineSetup, request: Request, folder: str | None) -> list[Answer]:
        """By an engine with the same numbers and nothing else."""
        plain = EngineSetup(setup.chance, setup.layout, setup.page_groups, quantize=setup.quantize)
        plain.guesses, plain.page_dtype, plain.lookahead = setup.guesses, setup.page_dtype, 0
        plain.limits = {name: setup.limits[name] for name in ("snapshots", "snapshot_tokens") if name in setup.limits}
        plain.limits["prefix_caching"] = False
        if folder is not None:
            plain.adapters, plain.limits["max_loras"] = setup.adapters, ADAPTER_SLOTS
        engine = self.engine(plain, lambda: 0.0, Faults())
        if folder is not None:
            engine.adapters.load("alone", folder)
            request = replace(request, adapter="alone")
        engine.add(replace(request, timeout_s=None, queue_timeout_s=None))
        answers = [Answer() for _ in range(request.samples)]
        while not engine.is_idle:
            outcome = engine.step()
            assert not outcome.failures, outcome.failures
            for update in outcome.updates:
                answer = answers[update.sample]
                answer.tokens += update.tokens
                answer.logprobs += update.logprobs or []
                answer.prompt_logprobs += update.prompt_logprobs or []
                answer.finish = update.finish
        return answers

    def check_answer(self, request: Request, sample: int, found: Answer, expected: Answer) -> None:
        assert found.finish is expected.finish
        if request.sampling.logprobs is not None:
            _check_near(found.logprobs, expected.logprobs)
        if request.prompt_logprobs is not None and not sample:
            _check_near(found.prompt_logprobs, expected.prompt_logprobs)

    def left_behind(self, engine: Engine) -> Iterator[str]:
        executor: Any = engine.executor
        if executor.programs.num_late:
            yield f"{executor.programs.num_late} programs that were compiled while requests waited"


def _check_near(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    np.testing.assert_allclose([one.logprob for one in found], [one.logprob for one in expected], atol=NEAR, rtol=0)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), {})


@cache
def grammars() -> Grammars:
    return Grammars(_tokenizer, (END,), VOCABULARY)


def _grammar(toy: Grammar) -> Grammar:
    """One that a model with bytes for tokens can follow, in place of a toy."""
    if toy.thinking_budget is not None:
        marks = ThinkingFormat("<think>", "</think>")
        rules = AnswerRules(plain=regex("[xyz]{3}"), thinking=marks, is_opened=True)
        guided = rules.grammar(mark_tokens(_tokenizer(), marks.marks))
        budget = ThinkingBudget(marks.begin, marks.end, True, toy.thinking_budget.max_tokens)
        return replace(guided, thinking_budget=budget)
    if int(toy.text) >= FORCING:
        return regex("(ab{1,2}cdefgh|bcxyz[0-9])ijklmnop{1,4}")
    return regex("[a-z ]{3,9}")
