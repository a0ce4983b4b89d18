"""Options of XLA's compiler."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import jax

from quire.ops.weights import coded

log = logging.getLogger(__name__)

Options = dict[str, Any]

# For large products the library's own choice is as good as a search, and is there at once.
UNTUNED: Options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# In steps of so many tokens a kernel takes longer than the host takes to launch it, so that the GPU begins with the
# first. A graph would have to be brought up to date as a whole before, which takes milliseconds.
MANY_TOKENS = 4096
WITHOUT_GRAPHS: Options = {**UNTUNED, "xla_gpu_enable_command_buffer": ""}
# Decodes of few rows gain from products that XLA writes itself; for more rows the library's are faster, although XLA,
# which times each alone, may choose its own.
FEW_ROWS = coded.FEW_ROWS
OF_THE_LIBRARY: Options = {"xla_gpu_enable_triton_gemm": False}
# On a CPU XLA hands large reductions to a library that sums in another order than XLA does, so that a row's sums would
# depend on how many rows are beside it. This keeps all of them with XLA. The option is experimental.
OWN_REDUCTIONS: Options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def step_options(num_tokens: int, *, is_timed: bool) -> Options:
    """Those of a GPU's step of so many tokens, whose products XLA times or not."""
    if is_timed:
        return OF_THE_LIBRARY if num_tokens > FEW_ROWS else {}
    return UNTUNED if num_tokens < MANY_TOKENS else WITHOUT_GRAPHS


def is_untuned(options: Options | None) -> bool:
    return options is UNTUNED or options is WITHOUT_GRAPHS


@cache
def cpu_options() -> Options:
    """OWN_REDUCTIONS where this XLA knows the option. Only sums over a vocabulary depend on it: norms are native."""
    try:
        jax.jit(lambda x: x).lower(0).compile(OWN_REDUCTIONS)
    except jax.errors.JaxRuntimeError as error:
        log.info("this XLA does not know %s: %s", next(iter(OWN_REDUCTIONS)), str(error).partition("\n")[0])
        return {}
    return OWN_REDUCTIONS


def timings_in(folder: Path) -> Options:
    """Timings of XLA are read from this folder and written to it, so that no other process takes them again."""
    return {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}
