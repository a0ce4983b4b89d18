"""Code of kernels in Mosaic, compiled for an H200 where there is no GPU: registers, spills and instructions.

    pip install 'jax[cuda13]'
    python bench/kernel_code.py four_bits [--rows 8] [--shape 28672x4096] [--group 128] [--form gated] [--keep FOLDER]
    python bench/kernel_code.py e4m3 [--rows 8] [--shape 4096x14336] [--form added]       (or int8)
    python bench/kernel_code.py codes [--rows 64] [--shape 4096x4096]
    python bench/kernel_code.py gated [--rows 256] [--shape 28672x4096]
    python bench/kernel_code.py scaled [--rows 64] [--shape 4096x14336]

It shows that a kernel is compiled, that its registers suffice, and how many instructions a change saves; not whether
its numbers are right, nor how long it takes. `--form`: what follows a product of few rows. The compiler, ptxas, is that
of CUDA's packages. `--keep` keeps the PTX.
"""

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of libraries that only a GPU needs

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from quire.ops.gpu.hopper import few_rows
from quire.ops.gpu.hopper.code_product import BLOCK, MOST_ROWS
from quire.ops.gpu.hopper.products import gate_codes, gate_many, has_blocks, multiply_codes
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits

# The facts about a device that the compiler asks for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[a-z]\w*)?)[\w.:]*\s", re.MULTILINE)
MOST_NAMES = 16


class Case(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    group: int
    form: str  # of few rows


def four_bits(case: Case) -> tuple[Callable[..., Any], Any]:
    outputs, inputs, group = case.outputs, case.inputs, case.group
    codes, scales = ((outputs, inputs // 2), "uint8"), ((outputs, inputs // group), "bfloat16")
    return few_rows_of(case, FourBits.of(matrix(codes, scales, (outputs, inputs), 4, group)))


def eight_bits(code_dtype: str, case: Case) -> tuple[Callable[..., Any], Any]:
    shape = case.outputs, case.inputs
    return few_rows_of(case, matrix((shape, code_dtype), ((case.outputs, 1), "float32"), shape, 8, case.inputs))


def matrix(codes: Any, scales: Any, shape: tuple[int, int], bits: int, group: int) -> Coded:
    return Coded(
        codes=jax.ShapeDtypeStruct(*codes), scales=jax.ShapeDtypeStruct(*scales), zeros=None, index=None,
        input_scale=None, input_zero=None, shape=shape, num_contracted=1, is_of_experts=False, bits=bits, group=group,
    )  # fmt: skip


def few_rows_of(case: Case, weight: Any) -> tuple[Callable[..., Any], Any]:
    """All but sums of a product that adds have a factor of each row."""
    rows, outputs, inputs, form = case.rows, case.outputs, case.inputs, case.form
    shapes = (rows, inputs), (rows, outputs), (outputs,)
    x, residual, norm = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    squares = jax.ShapeDtypeStruct((inputs // 16, rows), jnp.float32)
    is_for = weight is not None and few_rows.fits(rows, x.dtype, weight, is_gated=form == "gated")

    def run(x: Any, weight: Any, squares: Any, residual: Any, norm: Any) -> Any:
        factor = few_rows.RowFactor(squares, 1e-5)
        if not is_for:
            return None
        if form == "added":
            return few_rows.added(x, weight, residual, norm, 0.0)
        return few_rows.gated(x, weight, factor) if form == "gated" else few_rows.sums(x, weight, x.dtype, factor)

    return run, (x, weight, squares, residual, norm)


def codes(case: Case) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, case.inputs), jnp.float8_e4m3fn) for count in (case.rows, case.outputs)]
    has_kernel = has_blocks(case.rows, given[1], 1)
    return lambda rows, matrix: multiply_codes(rows, matrix, jnp.bfloat16) if has_kernel else None, given


def gated(case: Case) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, case.inputs), jnp.float8_e4m3fn) for count in (case.rows, case.outputs)]
    scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((case.rows, 1), (case.outputs,))]
    run = gate_codes if case.rows <= MOST_ROWS else gate_many
    return (
        lambda rows, matrix, of_rows, of_columns: run(rows, of_rows, matrix, of_columns, jnp.bfloat16),
        (*given, *scales),
    )


def scaled(case: Case) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, case.inputs), jnp.float8_e4m3fn) for count in (case.rows, case.outputs)]
    scales = jax.ShapeDtypeStruct((case.inputs // BLOCK, case.rows), jnp.float32)
    return lambda rows, matrix, scales: multiply_codes(rows, matrix, jnp.bfloat16, scales), (*given, scales)


KERNELS: dict[str, Callable[[Case], tuple[Callable[..., Any], Any]]] = {
    "four_bits": four_bits,
    "e4m3": partial(eight_bits, "float8_e4m3fn"),
    "int8": partial(eight_bits, "int8"),
    "codes": codes,
    "gated": gated,
    "scaled": scaled,
}


def compile_for_h200(function: Callable[..., Any], like: Any) -> None:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200)
    sharding = SingleDeviceSharding(topology.devices[0])
    given = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), like)
    jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--shape", default="4096x4096")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--form", choices=("sums", "gated", "added"), default="sums")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(place)
        outputs, inputs = map(int, options.shape.split("x"))
        compile_for_h200(*KERNELS[options.kernel](Case(options.rows, outputs, inputs, options.group, options.form)))
        texts = sorted(place.glob("*.ptx"))
        if not texts:
            parser.error(f"no kernel of Mosaic is for {options.rows} rows of {options.shape}")
        for path in texts:
            print(path.stem)
            told = path.with_suffix(".ptxas").read_text(encoding="utf-8")
            print(*re.findall(r"Used .*|\d+ bytes stack frame.*", told), sep="\n")
            counts = Counter(INSTRUCTION.findall(path.read_text(encoding="utf-8")))
            print(", ".join(f"{name} {count}" for name, count in counts.most_common(MOST_NAMES)))


if __name__ == "__main__":
    main()
