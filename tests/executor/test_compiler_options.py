"""Options of XLA for the steps of a GPU."""

import jax
import pytest

from quire.executor.programs.compiler_options import (
    FEW_ROWS,
    MANY_TOKENS,
    OF_THE_LIBRARY,
    UNTUNED,
    WITHOUT_GRAPHS,
    is_untuned,
    step_options,
)


def test_steps_of_many_tokens_are_launched_kernel_by_kernel() -> None:
    assert step_options(MANY_TOKENS - 1, is_timed=False) is UNTUNED
    assert step_options(MANY_TOKENS, is_timed=False) is WITHOUT_GRAPHS
    assert step_options(FEW_ROWS, is_timed=True) == {}
    assert step_options(FEW_ROWS + 1, is_timed=True) is OF_THE_LIBRARY
    assert [is_untuned(one) for one in (UNTUNED, WITHOUT_GRAPHS, OF_THE_LIBRARY, {}, None)] == [
        True,
        True,
        *[False] * 3,
    ]


@pytest.mark.parametrize("options", [UNTUNED, WITHOUT_GRAPHS, OF_THE_LIBRARY], ids=str)
def test_xla_knows_them(options: dict[str, object]) -> None:
    """Here, too: those of a GPU mean nothing to a CPU, but a name that XLA does not know is an error."""
    compiled = jax.jit(lambda x: x + 1).lower(0).compile(options)
    assert compiled(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1).lower(0).compile({"xla_gpu_no_such_option": 1})
