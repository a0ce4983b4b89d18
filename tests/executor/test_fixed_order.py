"""A token has the same numbers whatever else runs, where kernels of prompts and of decodes differ; and programs that
make a row depend on others are refused."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind
from quire.errors import EngineFailed, InvalidSetting
from quire.executor.launch import fields, launches_of, num_single
from quire.executor.programs import compiler
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.row_check import NUM_DECODES, RowCheck, step_of_decodes, step_of_prompts
from quire.executor.programs.table import ProgramTable
from quire.executor.sample import sampler
from quire.executor.sample.filters import filtered
from quire.executor.sample.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from quire.models.parts.decoder import Decoder
from quire.ops.attention.step_attention import PLAIN, Kernels
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.norms import Norms, add_rms_norm, rms_norm
from quire.ops.pages import TILE
from quire.request import Request, SamplingParams
from tests.executor.rig import SHAPES, Rig, Run, config_of, quickly_compiled
from tests.executor.workload import workload
from tests.fake_executor import plan_of

FIXED = replace(SHAPES, page_size=32, num_pages=80, min_tokens=8, specialised=True, fixed_order=True)
LIMITS: dict[str, Any] = {"replays": True, "forces_tokens": False}
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_batch_size": 1},
    {"lookahead": 2},
    {"max_batch_prefill_tokens": 1},
    {"max_batch_prefill_tokens": 7, "prefix_caching": False},
)


def unlike(q: Any, context: Any) -> Any:
    """Decodes that differ from prompts by far more than the last bits, as if they had a kernel of their own. Of a
    single key all kernels make the same."""
    out, tiles = tiled_attention(q, context), context.tiles
    rows = tiles.part(0, tiles.num_single)
    differs = (rows.lengths > 0) & (rows.starts > 0)
    is_row = jnp.zeros(len(q), bool).at[rows.offsets].max(differs)  # tiles of padding name the first token
    return jnp.where(is_row[:, None, None, None], out * 1.5, out)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    kernels = compiler.kernels_for("cpu", "float32")._replace(attend=unlike)
    with patch.object(compiler, "kernels_for", lambda *_: kernels), quickly_compiled():
        made = Rig(config_of("llama", num_hidden_layers=2), FIXED)
        yield made
    made.executor.close()


@pytest.fixture(scope="module")
def answers(rig: Rig) -> Any:
    """Greedy, drawn and filtered requests, and their answers with all of them together."""
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=1.0), SamplingParams(top_p=0.9, temperature=1.5)]
    requests = [one for seed, kind in enumerate(kinds, 3) for one in workload(rig, 6, seed=seed, sampling=kind)]
    requests = [replace(one, request_id=number) for number, one in enumerate(requests)]
    return requests, rig.run(requests, **LIMITS).tokens()


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_answers_do_not_depend_on_the_schedule(rig: Rig, answers: Any, settings: dict[str, Any]) -> None:
    requests, expected = answers
    assert rig.run(requests, **LIMITS, **settings).tokens() == expected


def preempt(engine: Any, steps: int) -> None:
    """All but one lose their slots, again and again."""
    live = engine.scheduler.request_ids()
    if live and steps % 7 in (4, 5):
        engine.scheduler.focus(live[:1] if steps % 7 == 4 else None)


@pytest.mark.parametrize("settings", [{"prefix_caching": False}, {"lookahead": 2}], ids=str)
def test_answers_do_not_depend_on_preemptions(rig: Rig, answers: Any, settings: dict[str, Any]) -> None:
    requests, expected = answers
    assert rig.run(requests, between=preempt, **LIMITS, **settings).tokens() == expected


def test_answers_do_not_depend_on_a_device_that_is_lost(rig: Rig, answers: Any) -> None:
    requests, expected = answers

    def lose(engine: Any, steps: int) -> None:
        if steps in (5, 12):
            rig.executor.reset()
            engine.scheduler.restart()

    run = rig.run(requests, between=lose, lookahead=0, **LIMITS)
    assert run.tokens() == expected


def test_without_replays_the_same_kernels_give_other_answers(rig: Rig, answers: Any) -> None:
    """So that the tests above would fail where a token is computed by the other kernel."""
    requests, expected = answers
    assert rig.run(requests, between=preempt, prefix_caching=False).tokens() != expected
    by_length = lambda plan, shapes, scored: launches_of(plan, replace(shapes, fixed_order=False), scored)  # noqa: E731
    with patch("quire.executor.executor.launches_of", by_length):
        assert rig.run(requests, **LIMITS, max_batch_prefill_tokens=1).tokens() != expected


def test_single_tokens_of_prompts_stay_prefills() -> None:
    chunks = [
        Chunk(1, 0, 0, 0, Kind.DECODE, 9, 1, (), True),
        Chunk(2, 0, 0, 1, Kind.DECODE, 9, 1, (), False),
        Chunk(3, 0, 0, 2, Kind.PREFILL, 4, 1, (), True),
        Chunk(4, 0, 0, 3, Kind.PREFILL, 0, 5, (), True),
    ]
    for shapes, num_rows in ((FIXED, 2), (replace(FIXED, fixed_order=False), 3)):
        (launch,) = launches_of(plan_of(1, chunks), shapes)
        assert (launch.num_rows, launch.indices.tolist()) == (num_rows, [0, 1, 2, 3])


def test_decodes_and_plain_samples_have_no_programs_of_their_own() -> None:
    keys = Catalog(FIXED).keys
    assert not {"decode", "burst", "shared", "plain"}.intersection(str(key[0]) for key in keys)
    assert {StepShape(8, decodes_only=True), StepShape(8), ("filtered", 8), ("any", 8)} <= set(keys)
    table = ProgramTable(FIXED.ladder, keys)
    assert table.sample(3, NOTHING_ASKED) == table.sample(3, NOTHING_ASKED._replace(filters=True)) == ("filtered", 8)
    assert table.sample(3, NOTHING_ASKED._replace(logprobs=True)) == ("any", 8)
    assert table.decode(3, 1, 1) is None


def test_no_program_has_fewer_rows_than_a_step() -> None:
    ladder = replace(FIXED, min_tokens=64, num_slots=64).ladder
    assert min(*(shape.tokens for shape in ladder.all()), *ladder.sample_sizes) == 64


@pytest.mark.parametrize("make", [step_of_prompts, step_of_decodes])
@pytest.mark.parametrize("num_slots", [8, 64, 256])
@pytest.mark.parametrize("max_prefill_tokens", [32, 2048])
def test_every_step_has_room_for_the_rows_that_are_compared(make: Any, num_slots: int, max_prefill_tokens: int) -> None:
    sizes = {"num_slots": num_slots, "max_prefill_tokens": max_prefill_tokens, "is_fine": True}
    shapes = replace(FIXED, **sizes)
    for shape in shapes.ladder.all():
        if (shape.decodes_only and make is step_of_prompts) or (shape.scores and make is step_of_decodes):
            continue
        into = fields(make(shape, shapes), shape, shapes)
        assert (into.positions >= 0).all(), "padding writes where the row's keys and values are"
        assert into.positions.max() < TILE <= shapes.page_size
        compared = set(into.positions[into.ends].tolist())
        assert {0, NUM_DECODES - 1} <= compared
        if shape.decodes_only:
            continue
        covered = np.zeros(shape.tokens, int)
        for offset, length in zip(into.tile_offsets, into.tile_lengths, strict=True):
            covered[offset : offset + length] += 1
        assert (covered == 1).all()
        assert (into.tile_lengths[: num_single(shape, shapes)] <= 1).all()
        used = into.tile_lengths > 0
        assert (into.positions[into.tile_offsets[used]] == into.tile_starts[used]).all()
        rows = num_single(shape, shapes) // 2
        if make is step_of_decodes:
            assert (into.ends < rows).all()
            assert compared == set(range(NUM_DECODES))
            assert (into.positions[rows:] >= NUM_DECODES).all(), "decodes read what decodes wrote"


def checked(kernels: Kernels, shapes: Shapes) -> int:
    """Make a model with these kernels, and hold all of its programs to each other. Returns their number."""
    with patch.object(compiler, "kernels_for", lambda *_: kernels), quickly_compiled():
        rig = Rig(config_of("llama", num_hidden_layers=1), shapes, programs="all")
    rig.executor.close()
    return rig.executor.programs.rows.num_checked


FEW = replace(FIXED, max_prefill_tokens=32, num_slots=16)


def test_programs_that_give_a_row_the_same_bits_are_used() -> None:
    kernels = compiler.kernels_for("cpu", "float32")
    assert checked(kernels, FEW) == len(FEW.ladder.all()) + 2 * len(FEW.ladder.sample_sizes)
    assert not RowCheck(replace(FEW, fixed_order=False)).is_due(StepShape(8))


def test_a_program_that_gives_a_row_other_bits_is_refused() -> None:
    def by_rows(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
        return rms_norm(x, weight, eps, offset) * (1.0 + 2.0**-20 * (len(x) > 16))

    with pytest.raises(InvalidSetting, match="have other bits in the last layer than in that for"):
        checked(PLAIN._replace(norms=Norms(rms=by_rows), decode_norms=Norms(rms=by_rows)), FEW)


def test_a_program_in_which_a_row_depends_on_its_place_is_refused() -> None:
    def by_place(x: Any, addend: Any, weight: Any, eps: float, offset: float) -> Any:
        total, normal = add_rms_norm(x, addend, weight, eps, offset)
        return total, normal * (1.0 + 2.0**-20 * (jnp.arange(len(x)) == 5)[:, None])

    norms = Norms(add_rms=by_place)
    with pytest.raises(InvalidSetting, match="rows that should be alike have other bits"):
        checked(PLAIN._replace(norms=norms, decode_norms=norms), FEW)


def check_these(keys: Sequence[Key], kernels: Kernels = PLAIN, shapes: Shapes = FEW) -> None:
    """Hold these programs of a small model to each other, in their order."""
    with patch.object(compiler, "kernels_for", lambda *_: kernels):
        executor = Rig(config_of("llama", num_hidden_layers=1), shapes).executor
        try:
            state = executor.programs.compiler.empty_state()
            for key in keys:
                state = executor.programs.checked(key, state)
        finally:
            executor.close()
    assert not np.asarray(state.slots.float_params).any(), "padding is greedy in steps"


def more(rows: int, limit: int) -> float:
    """A factor that changes the last bits where there are more rows, as the choice of another kernel would."""
    return 1.0 + 2.0**-20 * (rows > limit)


def logits_by_rows(limit: int) -> Any:
    exact = Decoder.logits

    def logits(self: Any, weights: Any, hidden: Any) -> Any:
        return exact(self, weights, hidden) * more(len(hidden), limit)

    return patch.object(Decoder, "logits", logits)


@pytest.mark.parametrize("way", ["filtered", "any"])
def test_a_product_with_the_head_that_depends_on_the_number_of_rows_is_refused(way: str) -> None:
    with logits_by_rows(8), pytest.raises(InvalidSetting, match=rf"16 samples \({way}\).* other bits in logits"):
        check_these([(way, 8), (way, 16)])


@pytest.mark.parametrize("way", ["filtered", "any"])
def test_filters_that_depend_on_the_number_of_rows_are_refused(way: str) -> None:
    def by_rows(logits: Any, *others: Any, **how: Any) -> Any:
        return filtered(logits, *others, **how) * more(len(logits), 8)

    with (
        patch.object(sampler, "filtered", by_rows),
        pytest.raises(InvalidSetting, match=rf"16 samples \({way}\).* other bits in filtered logits"),
    ):
        check_these([(way, 8), (way, 16)])


@pytest.mark.parametrize("way", ["filtered", "any"])
def test_draws_that_depend_on_the_number_of_rows_are_refused(way: str) -> None:
    exact = jnp.cumsum

    def by_rows(weights: Any, axis: int) -> Any:
        return exact(weights, axis=axis) * more(len(weights), 8)

    with (
        patch.object(sampler.jnp, "cumsum", by_rows),
        pytest.raises(InvalidSetting, match=rf"16 samples \({way}\).* other bits in the sums of draws"),
    ):
        check_these([(way, 8), (way, 16)])


def test_both_ways_to_sample_are_held_to_each_other() -> None:
    def by_way(logits: Any, *others: Any, branches: bool, cuts: Any) -> Any:
        return filtered(logits, *others, branches=branches, cuts=cuts) * more(branches, 0)

    with (
        patch.object(sampler, "filtered", by_way),
        pytest.raises(InvalidSetting, match=r"8 samples \(any\).* than in that for 8 samples \(filtered\)"),
    ):
        check_these([("filtered", 8), ("any", 8)])


SCORED = [StepShape(32, scores=True), StepShape(256, scores=True)]
LONGER = replace(FEW, max_prefill_tokens=256)


def test_scored_steps_have_products_of_one_number_of_rows() -> None:
    with logits_by_rows(32):
        check_these(SCORED, shapes=LONGER)


def test_scores_that_depend_on_their_place_are_refused() -> None:
    exact = Decoder.logits

    def by_place(self: Any, weights: Any, hidden: Any) -> Any:
        return exact(self, weights, hidden) * (1.0 + 2.0**-20 * (jnp.arange(len(hidden)) == 5)[:, None])

    with (
        patch.object(Decoder, "logits", by_place),
        pytest.raises(InvalidSetting, match=r"256 tokens scored .* other bits in log-probabilities of prompts"),
    ):
        check_these(SCORED, shapes=LONGER)


@pytest.mark.parametrize("is_decode", [False, True])
def test_attention_over_several_keys_that_depends_on_the_number_of_rows_is_refused(is_decode: bool) -> None:
    def by_rows(q: Any, context: Any) -> Any:
        out, tiles = tiled_attention(q, context), context.tiles
        rows, rest = tiles.part(0, tiles.num_single), tiles.part(tiles.num_single, len(tiles.lengths))
        decodes = jnp.zeros(len(q), bool).at[rows.offsets].max((rows.lengths > 0) & (rows.starts > 0))
        first = jnp.zeros(len(q), bool).at[rest.offsets].set(True).at[rows.offsets].set(True)
        changes = decodes if is_decode else ~first
        return jnp.where(changes[:, None, None, None], out * more(len(q), 8), out)

    shapes = [StepShape(8, decodes_only=True), StepShape(8), StepShape(16, decodes_only=is_decode)]
    with pytest.raises(InvalidSetting, match=r"16 .* other bits in the last layer than in that for 8"):
        check_these(shapes, PLAIN._replace(attend=by_rows))


def test_rows_of_zeros_are_no_check() -> None:
    def zeros(x: Any, addend: Any, weight: Any, eps: float, offset: float) -> Any:
        return jnp.zeros_like(x), jnp.zeros_like(x)

    with pytest.raises(InvalidSetting, match="cannot be checked: 8 tokens give zeros"):
        check_these([StepShape(8)], PLAIN._replace(norms=Norms(add_rms=zeros)))


def test_a_program_refused_in_the_middle_of_a_request_ends_the_engine_with_that_reason() -> None:
    with logits_by_rows(8):
        rig = Rig(config_of("llama", num_hidden_layers=1), FEW)
        many = [Request(request_id=number, prompt=(number + 5,), max_tokens=number + 1) for number in range(16)]
        run = Run(rig.engine())
        for request in many:
            run.engine.add(request)
        while not run.engine.is_idle:
            run.failures |= {failure.request_id: failure.error for failure in run.engine.step().failures}
        rig.executor.close()
    assert run.engine.num_faults == 1
    assert isinstance(run.engine.error, EngineFailed)
    assert "other bits in logits" in run.engine.error.message
    assert set(run.failures.values()) == {run.engine.error}
