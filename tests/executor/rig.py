"""A tiny model behind a compiled executor, engines that run requests on it, and the plain forward to hold them to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.core.limits import Limits
from quire.core.plan import TokenLogprobs
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.errors import QuireError
from quire.executor.draft.draft import Draft
from quire.executor.executor import JaxExecutor
from quire.executor.host.pinned_pages import host_kinds
from quire.executor.programs import compiler
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key
from quire.executor.programs.programs import Programs
from quire.executor.programs.replay import Members
from quire.executor.programs.store import ProgramStore
from quire.executor.programs.table import ProgramTable
from quire.executor.shapes import Shapes
from quire.files.tensor_source import TensorSource
from quire.models.adapters import AdapterReader, make_room
from quire.models.checkpoint import Quantize, load_weights
from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.request import FinishReason, Request
from tests.compiling import QUICKLY
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors, without_native
from tests.shared_programs import shared

Array = np.ndarray[Any, Any]

VOCAB_SIZE = 300  # no multiple of the sampler's blocks, nor of a mask's words
MAX_LENGTH = 192  # of a prompt and its answer
SHAPES = Shapes(
    num_pages=400, page_size=4, num_slots=8, max_prefill_tokens=96, max_sequence_tokens=MAX_LENGTH, min_tokens=4
)
# Fewer shapes than the first model's, for each is a program to compile.
FEW_SHAPES = Shapes(
    num_pages=400,
    page_size=8,
    num_slots=4,
    max_prefill_tokens=32,
    max_sequence_tokens=MAX_LENGTH,
    min_tokens=4,
)
NEAR = 2e-4  # two logits of these models that are so close may change places when sums are taken in another order


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**CASES[name], "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, **changes}


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """Without most optimisations: tiny models run for less time than they take to compile. Each program once in a run
    of the tests."""
    options = compiler.cpu_options() | QUICKLY
    with shared(), patch.object(compiler, "cpu_options", lambda: options):
        yield


class MadeWhenUsed(Programs):
    """Its table is that of a server with all programs, so that every step chooses as it would there; a program is
    compiled when it is first chosen. Most of a ladder is chosen by no test."""

    def compile_all(self) -> Iterator[float]:
        self.table = ProgramTable(self.compiler.shapes.ladder, self.catalog.keys)
        yield 1.0


class QuickCompiler(Compiler):
    def make(self, key: Key) -> Any:
        with quickly_compiled():
            return super().make(key)


@dataclass
class Answer:
    """What a client was told of one sample of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0


@dataclass
class Run:
    """Everything that came out of an engine, by request and sample, and the engine itself."""

    engine: Engine
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    failures: dict[int, QuireError] = field(default_factory=dict)

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        return {key: answer.tokens for key, answer in sorted(self.answers.items())}


def executor_of(
    model: Model,
    weights: ParamTree,
    shapes: Shapes,
    *,
    threads: int = 2,
    mesh: Mesh | None = None,
    store: ProgramStore | None = None,
    members: Members | None = None,
    draft: Draft | None = None,
    num_host_pages: int = 0,
    pins_host_pages: bool = False,
    is_made_when_used: bool = False,
) -> JaxExecutor:
    compiler = (QuickCompiler if is_made_when_used else Compiler)(model, weights, shapes, mesh, store, draft)
    kinds = host_kinds(num_host_pages, pins_host_pages)
    programs = (MadeWhenUsed if is_made_when_used else Programs)(compiler, threads, members, kinds)
    return JaxExecutor(programs, num_host_pages)


class Rig:
    """One model, its weights and its executor, which every run gets as `reset` leaves it.

    Scheduling differs between runs: the limits of a scheduler may be any that lie within the shapes compiled.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Shapes,
        checkpoint: TensorSource | None = None,
        programs: Literal["when used", "first", "all"] = "when used",
        quantize: Quantize = "none",
        draft_config: Mapping[str, Any] | None = None,
        num_host_pages: int = 0,
        pins_host_pages: bool = False,
        has_room: bool = False,
    ) -> None:
        """`draft_config`: of a model that guesses; with the same config as the other it has the same weights.
        `programs`: those that are compiled before this returns. `has_room`: adapters are below the weights,
        as on GPUs."""
        self.model = build_model(config)
        self.weights: ParamTree = load_weights(
            self.model, checkpoint or NamedTensors(self.model), dtype="float32", quantize=quantize
        )
        self.shapes = shapes
        weights = self.weights
        if has_room:
            weights = jax.tree.map(jnp.copy, without_native(weights))
            make_room(weights, self.model, shapes.adapters, share=0)
        draft = None
        if draft_config is not None:
            draft_model = build_model(draft_config)
            draft = Draft(draft_model, load_weights(draft_model, NamedTensors(draft_model), dtype="float32"))
        self.executor = executor_of(
            self.model, weights, shapes, threads=2 if programs == "all" else 1, draft=draft,
            num_host_pages=num_host_pages, pins_host_pages=pins_host_pages, is_made_when_used=programs == "when used",
        )  # fmt: skip
        for _ in self.executor.warm_up():
            if programs == "first" and self.executor.programs.can_run_anything:
                break
        # On a CPU, wherever the executor runs.
        self._reference = jax.jit(partial(_logits, self.model), compiler_options=QUICKLY)
        self._reference_weights = jax.device_put(self.weights, jax.devices("cpu")[0])

    def limits(self, **changes: Any) -> Limits:
        shapes = self.shapes
        defaults: dict[str, Any] = {
            "page_size": shapes.page_size,
            "num_pages": shapes.num_pages,
            "max_batch_size": shapes.num_slots,
            "max_step_tokens": shapes.num_slots + shapes.max_prefill_tokens,
            "max_batch_prefill_tokens": shapes.max_prefill_tokens,
            "max_sequence_tokens": shapes.max_sequence_tokens,
            "max_guesses": shapes.guesses,
            "max_loras": shapes.adapters.slots,
            "page_groups": self.executor.programs.compiler.layout.groups,
            "snapshots": shapes.num_snapshots if self.executor.programs.compiler.layout.slot_specs else None,
            "snapshot_tokens": 8,
        }
        return Limits(**(defaults | changes))

    def engine(self, lookahead: int = 1, executor: Executor | None = None, **limits: Any) -> Engine:
        self.executor.reset()
        allowed = self.limits(**limits)
        assert allowed.max_step_guesses <= self.shapes.step_guesses, "a step may have more guesses than it has room for"
        scheduler = Scheduler(allowed, lambda: 0.0, self.model.prefix_key, self.model.switch_length)
        sizes = self.shapes.adapters
        return Engine(
            scheduler,
            self.executor if executor is None else executor,
            lookahead,
            max_burst_s=float("inf"),
            clock=lambda: 0.0,  # the time that a step takes decides nothing, so that every run has the same steps
            read_adapter=AdapterReader(self.model, sizes.rank, jnp.dtype(sizes.dtype)) if sizes.slots else None,
        )

    def run(
        self,
        requests: Iterable[Request],
        *,
        between: Callable[[Engine, int], None] | None = None,
        engine: Engine | None = None,
        **settings: Any,
    ) -> Run:
        """Run requests to their end. `between` is called before each step with the number of steps so far."""
        run = Run(self.engine(**settings) if engine is None else engine)
        for request in requests:
            run.engine.add(request)
        steps = 0
        while not run.engine.is_idle:
            if between is not None:
                between(run.engine, steps)
            outcome = run.engine.step()
            steps += 1
            assert steps < 20_000, "the requests do not come to an end"
            for update in outcome.updates:
                answer = run.answers.setdefault((update.request_id, update.sample), Answer())
                assert answer.finish is None, "a sequence went on after its end"
                answer.tokens += update.tokens
                answer.logprobs += update.logprobs or []
                answer.prompt_logprobs += update.prompt_logprobs or []
                answer.finish = update.finish
                answer.cached_tokens = update.cached_tokens
            for failure in outcome.failures:
                run.failures[failure.request_id] = failure.error
        self.check_nothing_is_left(run.engine)
        return run

    def check_nothing_is_left(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        scheduler.check()
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1
        assert self.executor.programs.num_late == 0, "something was compiled while requests waited"

    def salt(self, prompt: tuple[int, ...]) -> str:
        """Keeps prompts apart that this model may not share pages between."""
        return str(self.model.prefix_key(len(prompt)))

    def logits(self, tokens: Iterable[int], num_prompt: int) -> Array:
        """The logits after each token [t, v], from one forward over the whole sequence, without pages."""
        known = np.zeros(MAX_LENGTH + 1, np.int32)
        tokens = list(tokens)
        known[: len(tokens)] = tokens
        lengths = np.maximum(num_prompt, np.arange(len(known)) + 1)
        rows = np.asarray(self._reference(self._reference_weights, known, lengths))[: len(tokens)]
        switch = self.model.switch_length
        if switch is not None and switch < len(tokens):  # those behind it are the same wherever the prompt ended
            lengths = np.maximum(switch + 1, lengths)
            beyond = np.asarray(self._reference(self._reference_weights, known, lengths))[switch : len(tokens)]
            rows = np.concatenate([rows[:switch], beyond])
        return rows

    def near_ties(self, request: Request, tokens: list[int]) -> int:
        """How often a greedy answer differs from the reference, which may only be between logits that are NEAR."""
        known = [*request.prompt, *tokens]
        rows = self.logits(known, len(request.prompt))[len(request.prompt) - 1 : -1]
        chosen = rows[np.arange(len(tokens)), tokens]
        behind = rows.max(axis=-1) - chosen
        assert behind.max(initial=0) < NEAR, f"token {behind.argmax()} of {request.request_id} is not the likeliest"
        return int((behind > 0).sum())


def _logits(model: Any, weights: ParamTree, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    context = TokenContext(tokens, jnp.arange(tokens.shape[0]), lengths)
    hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(whole_sequence))
    logits: jax.Array = model.logits(weights, hidden)
    return logits
