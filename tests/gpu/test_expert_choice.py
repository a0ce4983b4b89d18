"""The kernel that chooses experts against the plain choice, on a GPU where there is one and interpreted elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.expert_choice import Shares
from quire.ops.expert_choice import choose as plainly_chosen
from quire.ops.gpu.expert_choice import choose
from tests.gpu.test_kernels import INTERPRET

pytestmark = pytest.mark.gpu


def scores_of(tokens: int, experts: int) -> np.ndarray:
    return np.random.default_rng(tokens * experts).standard_normal((tokens, experts), np.float32) * 4


@pytest.mark.parametrize("shares", Shares)
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 4, 1), (3, 32, 4), (8, 60, 6), (5, 512, 10), (2, 9, 9)])
def test_experts_and_shares_are_those_of_a_sort(tokens: int, experts: int, chosen: int, shares: Shares):
    scores = jnp.asarray(scores_of(tokens, experts))
    share, expert = choose(scores, chosen, shares, interpret=INTERPRET)
    wanted_share, wanted = plainly_chosen(scores, chosen, shares)
    np.testing.assert_array_equal(expert, wanted)
    np.testing.assert_allclose(share, wanted_share, rtol=2e-6)


def test_shares_that_add_up_to_one_are_probabilities_divided_by_their_sum():
    scores = scores_of(6, 16)
    likely = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    highest = np.sort(likely, axis=1)[:, :-4:-1]
    of_all, of_chosen = (
        plainly_chosen(jnp.asarray(scores), 3, shares)[0] for shares in (Shares.OF_ALL, Shares.OF_CHOSEN)
    )
    np.testing.assert_allclose(of_all, highest, rtol=1e-5)
    np.testing.assert_allclose(of_chosen, highest / highest.sum(axis=1, keepdims=True), rtol=1e-5)


def test_of_equal_scores_the_first_are_chosen():
    scores = jnp.asarray([[1.0, 3.0, 3.0, 1.0, 1.0, 3.0]])
    for run in (plainly_chosen, lambda *given: choose(*given, interpret=INTERPRET)):
        assert run(scores, 5, Shares.SCORES)[1].tolist() == [[1, 2, 5, 0, 3]]


@pytest.mark.parametrize("shares", Shares)
def test_padding_chooses_what_the_first_token_does(shares: Shares):
    scores, is_real = jnp.asarray(scores_of(5, 24)), jnp.asarray([True, True, False, True, False])
    for run in (plainly_chosen, lambda *given: choose(*given, interpret=INTERPRET)):
        expert = np.asarray(run(scores, 3, shares, is_real)[1])
        alone = np.asarray(plainly_chosen(scores, 3, shares)[1])
        np.testing.assert_array_equal(expert, alone[[0, 1, 0, 3, 0]])


@pytest.mark.parametrize("fault", [np.nan, -np.inf, np.inf])
def test_none_is_chosen_twice_where_scores_are_no_numbers(fault: float):
    """A kernel would write its products to places that do not exist."""
    scores = scores_of(4, 12)
    scores[1], scores[2, 3:], scores[3, 5] = fault, fault, fault
    expert = np.asarray(choose(jnp.asarray(scores), 4, Shares.OF_CHOSEN, interpret=INTERPRET)[1])
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in expert.tolist())
    np.testing.assert_array_equal(expert[0], np.argsort(-scores[0])[:4])
