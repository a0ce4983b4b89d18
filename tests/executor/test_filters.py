"""The cuts of top-k, top-p, min-p and typical-p against sorts in numpy, and what a step pays for them."""

from typing import Any

import jax
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from quire.executor.sample.filters import filtered
from quire.executor.sample.sampler import Features, sample
from quire.executor.slots import MIN_P, TOP_P, TYPICAL_P
from quire.request import SamplingParams
from tests.executor.sampling import slot_start, slots_of
from tests.executor.sampling_reference import possibly_kept

Array = np.ndarray[Any, Any]
VOCAB = 23
compiled = jax.jit(filtered)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Array:
    """Some with many ties, some that leave one token all the mass, some with tokens that cannot be."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    logits = rng.normal(0, draw(st.sampled_from([0.01, 1.0, 5.0, 100.0, 3e4])), VOCAB)
    if draw(st.booleans()):
        logits = np.round(logits)
    impossible = draw(st.integers(0, VOCAB - 1))
    logits[rng.permutation(VOCAB)[:impossible]] = draw(st.sampled_from([-np.inf, -1e30, 0.0]))
    return (logits - logits.max()).astype(np.float32)


shares = st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]) | st.floats(1e-3, 1.0)
params = st.builds(
    SamplingParams,
    top_k=st.integers(0, VOCAB + 2),
    top_p=shares | st.just(1.0),
    min_p=st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 1),
    typical_p=shares | st.just(1.0),
)


@given(logits=rows_of_logits(), params=params)
@example(np.zeros(VOCAB, np.float32), SamplingParams(top_k=1, top_p=0.01, typical_p=0.01))
def test_filters_keep_exactly_what_sorting_keeps(logits: Array, params: SamplingParams) -> None:
    numbers = np.zeros((1, 7), np.float32)
    numbers[0, [TOP_P, MIN_P, TYPICAL_P]] = params.top_p, params.min_p, params.typical_p
    out = np.asarray(compiled(logits[None], np.asarray([params.top_k]), numbers))[0]
    # What has no chance anyway may stay or go.
    possible = np.exp(logits) > 0
    keeps = np.isfinite(out) & possible
    assert any(np.array_equal(keeps, expected & possible) for expected in possibly_kept(logits, params))
    assert np.array_equal(out[keeps], logits[keeps])
    assert keeps.any()


def test_each_search_is_made_only_when_a_row_wants_it() -> None:
    """Also not for rows of padding, whose numbers are all 0."""
    traced = jax.make_jaxpr(filtered)(np.zeros((1, VOCAB), np.float32), np.zeros(1, int), np.zeros((1, 7), np.float32))
    searches = [inside for name, inside in primitives(traced.jaxpr) if name in ("while", "scan")]
    assert searches == [("cond",)] * 3
    logits = np.linspace(-3, 0, VOCAB, dtype=np.float32)[None]
    assert np.array_equal(compiled(logits, np.zeros(1, int), np.zeros((1, 7), np.float32)), logits)


def primitives(jaxpr: Any, inside: tuple[str, ...] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Every operation of a traced program with the control flow around it."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        found.append((name, inside))
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += primitives(inner, (*inside, name))
    return found


def test_a_step_pays_for_a_feature_only_when_a_row_asks_for_it() -> None:
    rows, vocab = 4, 300
    slots = slots_of([slot_start(SamplingParams())])
    features = Features(*(np.asarray(False) for _ in Features._fields))
    masks = np.zeros((rows, 10), np.uint32)
    traced = jax.make_jaxpr(sample)(
        np.zeros((rows, vocab), np.float32), slots, np.zeros(rows, int), np.zeros(rows, int), masks, features
    )
    found = primitives(traced.jaxpr)
    names = {name for name, _ in found}
    assert "sort" not in names
    assert {"cond", "top_k", "scatter-add"} <= names
    costly = {"top_k", "scatter-add", "scatter", "while", "scan", "log"}
    outside = [(name, inside) for name, inside in found if name in costly and "cond" not in inside]
    assert outside == []
    # Drawing takes one exponential of the logits, and a step that is greedy throughout does without.
    exponentials = [inside for name, inside in found if name == "exp"]
    assert [inside.count("cond") for inside in exponentials].count(1) == 2  # to draw, and in log-probabilities
    assert () not in exponentials
