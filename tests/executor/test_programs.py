"""The compiled programs: pages that stay where they are, and serving that begins before everything is ready."""

import re
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.core.plan import Chunk, Kind, device_copy
from quire.engine.engine import Engine
from quire.executor.executor import JaxExecutor
from quire.executor.launch import sizes
from quire.executor.programs import compiler
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key, kind_of
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.store import ProgramStore
from quire.executor.sample.sampler import Features
from quire.executor.shapes import Shapes
from quire.executor.step import Compiled, Weights, forward
from quire.models.checkpoint import load_weights
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN
from quire.ops.kernels import kernels_for
from quire.ops.pages import Segments
from quire.request import Request, SamplingParams
from tests.compiling import AS_SERVED
from tests.executor.rig import FEW_SHAPES, Rig, config_of, executor_of, quickly_compiled
from tests.executor.sampling import slot_start
from tests.executor.test_replay import Direct
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY, workload
from tests.fake_executor import plan_of
from tests.models.tiny import NamedTensors
from tests.patience import WAIT_S, wait_until

# So many pages that one of their arrays is larger than everything else a step needs.
SHAPES = Shapes(num_pages=20_011, page_size=4, num_slots=4, max_prefill_tokens=32, max_sequence_tokens=64, min_tokens=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(config_of("gemma2", num_hidden_layers=2))


@pytest.fixture(scope="module")
def weights(model: Model) -> ParamTree:
    return load_weights(model, NamedTensors(model), dtype="float32")


@pytest.fixture(scope="module")
def executor(model: Model, weights: ParamTree) -> JaxExecutor:
    """Optimised as in service, and not warmed up: each program is compiled when it is asked for."""
    return executor_of(model, weights, SHAPES)


def page_shape(executor: JaxExecutor) -> tuple[int, ...]:
    shapes = {array.shape for pair in executor.programs.compiler.empty_state().pages for array in pair}
    assert len(shapes) == 1
    return shapes.pop()


def instructions(text: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, operation and shape of everything in a compiled program that gives one array."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if match:
            found.append((match[1], match[3], tuple(int(size) for size in match[2].split(",") if size)))
    return found


@pytest.mark.parametrize("shape", [StepShape(4), StepShape(36), StepShape(32, scores=True)], ids=str)
def test_no_step_copies_a_page_array(executor: JaxExecutor, shape: StepShape) -> None:
    check_pages_stay(executor.programs.get(shape), page_shape(executor))


def test_no_step_copies_a_page_array_where_attention_is_xlas(
    executor: JaxExecutor, model: Model, weights: ParamTree
) -> None:
    shape = StepShape(36)
    step = partial(forward, Compiled(model, PLAIN, SHAPES, executor.programs.compiler.layout), shape)
    state = jax.eval_shape(executor.programs.compiler.empty_state)
    packed = jax.ShapeDtypeStruct((sum(sizes(shape, SHAPES)),), "int32")
    lowered = jax.jit(step, donate_argnums=1).lower(Weights(weights), state, packed)
    check_pages_stay(lowered.compile(AS_SERVED), page_shape(executor))


def check_pages_stay(compiled: Any, shape: tuple[int, ...]) -> None:
    num_bytes = 4 * prod(shape)
    text = compiled.as_text()
    whole = [(name, operation) for name, operation, its in instructions(text) if prod(its) >= prod(shape)]
    operations = {operation for _, operation in whole}
    # They come in, are written to, in or outside of a fusion, and go through loops that read them.
    assert operations <= {"parameter", "get-tuple-element", "scatter", "fusion", "dynamic-update-slice", "bitcast"}
    scatters = sum(operation == "scatter" for _, operation in whole)
    assert scatters + 2 * text.count('custom_call_target="quire_place_heads"') == 4
    aliased = {int(number) for number in re.findall(r"\{\d+\}: \((\d+), \{\}", text.splitlines()[0])}
    entry = text[text.index("\nENTRY") :]
    pages = [
        int(number)
        for dimensions, number in re.findall(r"= f32\[([\d,]+)\]\S* parameter\((\d+)\)", entry)
        if tuple(int(part) for part in dimensions.split(",")) == shape
    ]
    assert len(pages) == 4
    assert set(pages) <= aliased
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * num_bytes
    assert memory.temp_size_in_bytes < num_bytes


def test_copies_of_pages_are_written_in_place(executor: JaxExecutor) -> None:
    memory = executor.programs.get(("copy", 1)).memory_analysis()
    num_bytes = 4 * prod(page_shape(executor))
    assert memory.alias_size_in_bytes == 4 * num_bytes
    assert memory.temp_size_in_bytes < num_bytes


def test_the_test_of_copies_notices_one(executor: JaxExecutor) -> None:
    shape = page_shape(executor)
    kept = jax.jit(lambda pages: pages.at[3].set(0.0)).lower(jax.ShapeDtypeStruct(shape, "float32")).compile()
    whole = {operation for _, operation, its in instructions(kept.as_text()) if its == shape}
    assert "copy" in whole
    assert kept.memory_analysis().alias_size_in_bytes == 0


def test_sampling_features_that_no_row_may_need_are_inside_conditions(executor: JaxExecutor) -> None:
    """As it was optimised: what is outside of them is paid for by every step."""
    program: Any = executor.programs.sample(4, Features(*[False] * 5))[1]
    text = program.as_text()
    entry = text[text.index("\nENTRY") :]
    # Changes of logits and what is drawn from them have one where a kernel finds the likeliest token.
    has_kernel = kernels_for("cpu", "float32").sampling.highest is not None
    assert len(re.findall(r" conditional\(", entry)) == (2 if has_kernel else 5)
    assert re.search(r"TopK|topk| sort\(", text)
    assert not re.search(r"TopK|topk| sort\(| while\(", entry)


def test_serving_begins_with_the_first_programs_and_never_waits_for_another() -> None:
    """Requests keep coming until every program is in the table; none of their steps meets one that is not."""
    ladder = FEW_SHAPES.ladder
    requests: list[Request] = []
    with quickly_compiled():
        rig = Rig(config_of("llama", num_hidden_layers=1), FEW_SHAPES, programs="first")
        programs = rig.executor.programs
        assert not programs.table.keys.issuperset(ladder.all())

        def arrive(engine: Engine, step: int) -> None:
            if engine.scheduler.num_requests < 3 and not programs.table.keys.issuperset(ladder.all()):
                like = workload(rig, 1, seed=step, longest=30, max_tokens=1 + step % 8)[0]
                requests.append(replace(like, request_id=step, prompt_logprobs=[None, 0][step % 5 == 0]))
                engine.add(requests[-1])
            sleep(0.01)  # the processor is for the compiler

        first = replace(workload(rig, 1)[0], request_id=1_000_000)
        # One at a time, so that prefills and decodes need shapes of their own. It also asserts that nothing was late.
        run = rig.run([first], between=arrive, max_batch_size=1)
    assert programs.table.keys.issuperset(ladder.all())
    assert check(rig, [first, *requests], run) <= 1
    rig.executor.close()


class SlowCompiler(Compiler):
    """Makes its programs when it is told to, in place of compiling."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._may_make: dict[Key, Event] = {}
        self.asked: set[Key] = set()
        super().__init__(*given, **named)

    def make(self, key: Key) -> Any:
        self.asked.add(key)
        assert self._may_make.setdefault(key, Event()).wait(WAIT_S)
        return key

    def let(self, *keys: Key) -> None:
        for key in keys:
            self._may_make.setdefault(key, Event()).set()


def test_a_table_has_nothing_until_any_plan_can_run_and_then_each_program_that_is_made(
    model: Model, weights: ParamTree
) -> None:
    compiler = SlowCompiler(model, weights, FEW_SHAPES)
    programs = Programs(compiler, threads=64)
    first, keys = programs.catalog.first, programs.catalog.keys
    later = keys[len(first) :]
    shares = programs.compile_all()
    next(shares)
    # Everything but one of the first, and one of the others.
    compiler.let(*first[1:], *later[1:])
    for _ in range(len(keys) - 2):
        next(shares)
    assert not programs.table.keys
    assert not programs.can_run_anything
    assert programs.num_unfinished == 2
    compiler.let(first[0])
    next(shares)
    assert programs.can_run_anything
    assert programs.table.keys == {*first, *later[1:]}
    compiler.let(later[0])
    assert list(shares)[-1] == 1
    assert programs.num_unfinished == 0
    assert programs.table.keys == set(keys)
    programs.close()


def test_the_log_says_how_many_programs_are_to_come_and_when_all_are_there(
    model: Model, weights: ParamTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    compiler = SlowCompiler(model, weights, FEW_SHAPES)
    programs = Programs(compiler, threads=2)
    first, keys = programs.catalog.first, programs.catalog.keys
    shares = programs.compile_all()
    next(shares)
    compiler.let(*first)
    for _ in first:
        next(shares)
    assert programs.can_run_anything
    programs.begin_serving()
    assert f"{len(keys) - len(first)} more programs are compiled" in caplog.text
    assert "all programs are compiled" not in caplog.text
    compiler.let(*keys)
    wait_until(lambda: "all programs are compiled" in caplog.text)
    programs.close()


def test_a_program_that_a_step_waits_for_is_counted_once(model: Model, weights: ParamTree) -> None:
    compiler = SlowCompiler(model, weights, FEW_SHAPES)
    programs = Programs(compiler, threads=1)
    keys: list[Key] = [StepShape(1), ("start", 1)]
    compiler.let(*keys)
    assert programs.num_late == 0
    for count, key in enumerate(keys, start=1):
        made: Any = [programs.get(key), programs.get(key)]
        assert made == [key, key]
        assert programs.num_late == count
    programs.close()


class Full(ProgramStore):
    """Has a file for every program."""

    def has(self, name: str) -> bool:
        return True


def test_programs_on_disk_are_in_the_table_while_they_are_loaded_and_a_step_waits_for_its_own(
    model: Model, weights: ParamTree, tmp_path: Path
) -> None:
    compiler = SlowCompiler(model, weights, FEW_SHAPES, store=Full(tmp_path, "a model"))
    programs = Programs(compiler, threads=64)
    programs.load_kept()
    next(programs.compile_all())
    assert programs.can_run_anything
    assert programs.table.keys == {*programs.catalog.first, *programs.catalog.early}
    wanted = programs.table.forward(StepShape(1), 0)
    compiler.let(wanted)
    program: Any = programs.get(wanted)
    assert program == wanted  # whatever became of the others
    assert programs.num_late == 0
    compiler.let(*programs.catalog.keys)
    programs.close()


class TimesDecodes(SlowCompiler):
    """As on a GPU."""

    def times_decodes(self, rows: int) -> bool:
        return True


SPECIALISED = replace(FEW_SHAPES, specialised=True)
DECODES = {("decode", shape.tokens) for shape in SPECIALISED.ladder.decodes}


@pytest.mark.parametrize("is_kept", [True, False])
def test_kept_programs_of_timed_products_are_loaded_with_the_others_and_nothing_waits_for_a_timing(
    model: Model, weights: ParamTree, tmp_path: Path, is_kept: bool
) -> None:
    store = Full(tmp_path, "a model") if is_kept else ProgramStore(tmp_path, "another")
    compiler = TimesDecodes(model, weights, SPECIALISED, store=store)
    programs = Programs(compiler, threads=64)
    programs.begin()  # before the weights are there
    others = {key for key in programs.catalog.keys if kind_of(key).samples}
    wait_until(lambda: compiler.asked >= others)
    assert compiler.asked.isdisjoint(DECODES) == (not is_kept)
    compiler.let(*(key for key in programs.catalog.keys if key not in DECODES))
    next(programs.compile_all())
    wait_until(lambda: not compiler.asked.isdisjoint(DECODES))
    compiler.let(*DECODES)
    programs.close()


def test_members_of_a_group_may_lack_what_one_of_them_keeps_so_that_all_time_it(
    model: Model, weights: ParamTree, tmp_path: Path
) -> None:
    compiler = TimesDecodes(model, weights, SPECIALISED, store=Full(tmp_path, "a model"))
    programs = Programs(compiler, threads=64, members=Alone())
    programs.begin()
    compiler.let(*programs.catalog.keys)
    wait_until(lambda: programs.num_unfinished == 0)
    assert compiler.asked
    assert compiler.asked.isdisjoint(DECODES)
    programs.close()


class Alone(Direct):
    """Members that make nothing."""

    def prepare(self, key: Any) -> None:
        pass

    def confirm(self, key: Any) -> None:
        pass


class Asked(ProgramStore):
    """Takes down the names that it is asked for."""

    def has(self, name: str) -> bool:
        self.names = [*getattr(self, "names", ()), name]
        return False


def test_engines_with_other_bursts_share_all_programs_but_those_of_bursts(
    model: Model, weights: ParamTree, tmp_path: Path
) -> None:
    stores = [Asked(tmp_path, "a model") for _ in range(2)]
    for store, count in zip(stores, (2, 4), strict=True):
        compiler = Compiler(model, weights, replace(FEW_SHAPES, burst=count), None, store)
        for key in (StepShape(8), ("decode", 8), ("burst", 8)):
            compiler.is_kept(key)
    differs = [one != other for one, other in zip(*(store.names for store in stores), strict=True)]
    assert differs == [False, False, True]


def test_small_programs_are_kept_and_check_and_empty_state_trace_nothing(
    model: Model, weights: ParamTree, tmp_path: Path
) -> None:
    """Tracing the first program of a process takes a tenth of a second."""

    def executor() -> JaxExecutor:
        return executor_of(model, weights, FEW_SHAPES, store=ProgramStore(tmp_path, "a model"))

    executor().close()
    made = executor()
    with jax.no_tracing():
        made.check_device()
        made.reset()
    assert all(not array.any() for array in jax.tree.leaves(made.state.pages))
    made.close()


def test_page_copies_run_in_their_order_before_the_chunks(any_llama: Rig) -> None:
    """Also more than one program copies, and one that reads what another wrote."""
    executor, page_size = any_llama.executor, any_llama.shapes.page_size
    prompt = tuple(range(20, 20 + 2 * page_size))
    executor.reset()
    pages = (7, 8)
    first = Chunk(0, 0, 0, 0, Kind.PREFILL, 0, 2 * page_size, (pages,), True)
    expected = executor.submit(plan_of(1, (first,), started=(slot_start(GREEDY, prompt=prompt),))).result()
    # Each of the two pages wanders through twenty others before the second sequence reads it.
    copies = [device_copy(page + 20 * turn, page + 20 * (turn + 1)) for turn in range(10) for page in pages]
    moved = tuple(page + 200 for page in pages)
    again = Chunk(1, 0, 0, 1, Kind.PREFILL, 2 * page_size - 1, 1, (moved,), True)
    plan = plan_of(2, (again,), copies=tuple(copies), started=(slot_start(GREEDY, slot=1, prompt=prompt),))
    assert executor.submit(plan).result().tokens == expected.tokens
    assert executor.programs.num_late == 0


def test_padding_is_counted(llama: Rig) -> None:
    executor = llama.executor
    executor.reset()
    before = executor.num_padding_tokens
    chunk = Chunk(0, 0, 0, 0, Kind.PREFILL, 0, 9, ((1, 2, 3),), True)
    executor.submit(plan_of(1, (chunk,), started=(slot_start(GREEDY, prompt=tuple(range(9))),))).result()
    assert executor.num_padding_tokens - before == 16 - 9


def test_programs_for_common_cases_give_the_tokens_of_those_for_all() -> None:
    """Greedy, plain and filtered rows, together and apart, with penalties and log-probabilities among them."""
    config = config_of("llama", num_hidden_layers=1)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logprobs=2),
    ]
    answers = []
    bursts = []
    with quickly_compiled():
        for specialised in (False, True):
            rig = Rig(config, replace(FEW_SHAPES, burst=4 if specialised else 1, specialised=specialised))
            requests = [
                replace(request, sampling=kinds[index // 2 % len(kinds)], seed=index, max_tokens=4 + index)
                for index, request in enumerate(workload(rig, 10, longest=30))
            ]
            for max_burst in (1, 4):
                runs = [rig.run(those, max_burst=max_burst) for those in (requests, requests[1:3])]
                answers.append([run.tokens() for run in runs])
                bursts.append(sum(run.engine.scheduler.counters.steps for run in runs))
            rig.executor.close()
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert bursts[1] == bursts[3] < bursts[0] == bursts[2]


def attend_fresh(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    """Plain, and NaN for padding."""
    at = jnp.arange(len(q))
    which = jnp.sum((at[:, None] >= segments.offsets) & (segments.offsets >= 0), axis=1) - 1
    real = at < (segments.offsets + segments.lengths)[which]
    seen = (at[:, None] >= at) & (which[:, None] == which)
    logits = jnp.where(seen, jnp.einsum("tkgh,skh->kgts", q, k) * spec.scale, -jnp.inf)
    out = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(logits, axis=-1), v)
    return jnp.where(real[:, None, None, None], out, jnp.nan)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_prompts_that_are_alone_in_a_step_are_answered_as_others_are(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their attention makes of padding: it reaches no token."""
    used: list[StepShape] = []
    find = Programs.forward

    def forward(self: Programs, *launch: Any) -> Any:
        found = find(self, *launch)
        used.append(found[0])
        return found

    monkeypatch.setattr(Programs, "forward", forward)
    monkeypatch.setattr(compiler, "kernels_for", lambda *_: PLAIN._replace(attend_fresh=attend_fresh))
    shapes = replace(FEW_SHAPES, max_prefill_tokens=96, fresh_from=64, max_fresh_sequences=2)
    with quickly_compiled():
        rig = Rig(config_of(family, num_hidden_layers=2), shapes)
        requests = [
            Request(number, tuple(range(number, number + length)), 5, sampling=SamplingParams(temperature=0))
            for number, length in enumerate([49, 45, 60, 10, 50], start=1)
        ]
        assert check(rig, requests, rig.run(requests, max_batch_size=2)) <= 1
        rig.executor.close()
    assert {shape.fresh_sequences for shape in used} == {0, 1, 2}


class BrokenCompiler(Compiler):
    """Cannot compile one of its programs."""

    broken: Key | None = None

    def make(self, key: Key) -> Any:
        if key == self.broken:
            raise NotImplementedError("there is no such kernel here")
        return super().make(key)


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_program_that_cannot_be_compiled_is_done_without_unless_nothing_else_can_run(
    model: Model, weights: ParamTree, caplog: pytest.LogCaptureFixture, is_needed: bool
) -> None:
    ladder = FEW_SHAPES.ladder
    needless = next(shape for shape in ladder.all() if shape not in ladder.first() and not shape.scores)
    compiler = BrokenCompiler(model, weights, FEW_SHAPES)
    compiler.broken = ladder.first()[0] if is_needed else needless
    programs = Programs(compiler, threads=2)
    with quickly_compiled():
        if is_needed:
            with pytest.raises(NotImplementedError):
                list(programs.compile_all())
        else:
            assert list(programs.compile_all())[-1] == 1
            assert programs.table.forward(needless, 0) != needless
            assert "there is no such kernel here" in caplog.text
        programs.close()
