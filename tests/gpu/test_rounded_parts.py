"""Parts of contexts that are put together and rounded in one launch, against doing one after the other: on a GPU where
there is one, and interpreted elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.rounded_parts import round_parts
from quire.ops.weights.rounded_rows import RoundedRows, round_rows
from tests.gpu.test_kernels import INTERPRET
from tests.gpu.test_rounded_rows import each_code

pytestmark = pytest.mark.gpu


def parts_of(tokens: int, heads: tuple[int, int], size: int, num_parts: int) -> tuple[jax.Array, Parts]:
    """With exponents that are far apart, and rows of very different sizes."""
    chance = np.random.default_rng(tokens)
    shape = num_parts, tokens, *heads
    outs = chance.normal(size=(*shape, size)) * np.exp(chance.uniform(-6, 6, (1, tokens, 1, 1, 1)))
    highest, totals = chance.uniform(-30, 30, shape), chance.uniform(1, 300, shape)
    out = jnp.asarray(chance.normal(size=(tokens, *heads, size)), jnp.bfloat16)
    return out, Parts(*(jnp.asarray(one, jnp.float32) for one in (outs, highest, totals)))


def rounded(out: jax.Array, counts: jax.Array, parts: Parts, code_dtype: str) -> RoundedRows:
    return jax.jit(partial(round_parts, code_dtype=jnp.dtype(code_dtype), interpret=INTERPRET))(out, counts, parts)


@each_code
@pytest.mark.parametrize(
    ("heads", "size", "num_parts"),
    [((8, 4), 128, 16), ((1, 8), 128, 3), ((4, 7), 128, 16), ((2, 3), 80, 5)],
    ids=str,
)
def test_codes_are_those_of_what_is_put_together(
    heads: tuple[int, int], size: int, num_parts: int, code_dtype: str
) -> None:
    counts = jnp.asarray([*range(num_parts + 1), 1, 0], jnp.int32)
    out, parts = parts_of(len(counts), heads, size, num_parts)
    out = out.at[jnp.flatnonzero(counts != 1)].set(jnp.nan)  # nothing has been written there
    got = rounded(out, counts, parts, code_dtype)
    together = combine_parts(out, counts, parts, interpret=INTERPRET).reshape(len(counts), -1)
    right = round_rows(together, jnp.dtype(code_dtype))
    np.testing.assert_array_equal(np.asarray(got.values, np.float32), np.asarray(together, np.float32))
    # Sums in another order may be rounded to the next number of bfloat16, and that to the next code.
    np.testing.assert_allclose(got.scales, right.scales, rtol=2.0**-7)
    near, numbers = np.asarray(got.codes, np.float32) * np.asarray(got.scales), np.asarray(together, np.float32)
    for row in range(len(counts)):
        assert np.linalg.norm(near[row] - numbers[row]) <= 0.05 * np.linalg.norm(numbers[row]), row
    alone = np.flatnonzero(np.asarray(counts) == 1)
    np.testing.assert_array_equal(np.asarray(got.codes)[alone], np.asarray(right.codes)[alone])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    counts = jnp.asarray([5, 1, 2, 16, 0], jnp.int32)
    out, parts = parts_of(len(counts), (8, 4), 128, 16)
    whole = rounded(out, counts, parts, "float8_e4m3fn")
    for row in range(len(counts)):
        own = slice(row, row + 1)
        alone = rounded(out[own], counts[own], Parts(*(one[:, own] for one in parts)), "float8_e4m3fn")
        np.testing.assert_array_equal(np.asarray(alone.codes[0]), np.asarray(whole.codes[row]))
        assert alone.scales[0] == whole.scales[row]


def test_a_number_that_is_none_makes_its_row_none() -> None:
    counts = jnp.asarray([2, 1, 3], jnp.int32)
    out, parts = parts_of(3, (2, 4), 128, 3)
    parts = parts._replace(outs=parts.outs.at[1, 0, 1, 2, 7].set(jnp.nan))
    got = rounded(out.at[1, 0, 0, 3].set(jnp.nan), counts, parts, "float8_e4m3fn")
    assert np.isnan(np.asarray(got.scales))[:, 0].tolist() == [True, True, False]
