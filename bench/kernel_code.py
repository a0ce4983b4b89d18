"""Code of kernels in Mosaic, compiled for an H200 where there is no GPU: registers, spills and instructions.

    pip install 'jax[cuda13]'
    python bench/kernel_code.py four_bits [--rows 8] [--shape 28672x4096] [--group 128] [--keep FOLDER]
    python bench/kernel_code.py codes [--rows 64] [--shape 4096x4096]
    python bench/kernel_code.py gated [--rows 256] [--shape 28672x4096]
    python bench/kernel_code.py scaled [--rows 256] [--shape 4096x14336]

It shows that a kernel is compiled, that its registers suffice, and how many instructions a change saves; not whether
its numbers are right, nor how long it takes. The compiler, ptxas, is that of CUDA's packages. `--keep` keeps the PTX.
"""

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of libraries that only a GPU needs

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from quire.ops.coded import Coded
from quire.ops.four_bits import FourBits
from quire.ops.gpu.code_product import BLOCK, MOST_ROWS, code_product
from quire.ops.gpu.gated_codes import gated_codes
from quire.ops.gpu.kernels import has_blocks, multiply_codes, multiply_four_bits
from quire.ops.gpu.many_gated_codes import many_gated_codes
from quire.ops.gpu.many_scaled_product import many_scaled_product

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


def four_bits(rows: int, outputs: int, inputs: int, group: int) -> tuple[Callable[..., Any], Any]:
    groups = jax.ShapeDtypeStruct((outputs, inputs // group), jnp.bfloat16)
    weight = FourBits.of(
        Coded(
            codes=jax.ShapeDtypeStruct((outputs, inputs // 2), jnp.uint8), scales=groups, zeros=None, index=None,
            input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1, is_of_experts=False, bits=4,
            group=group,
        )
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    return lambda x, weight: None if weight is None else multiply_four_bits(x, weight, x.dtype), (x, weight)


def codes(rows: int, outputs: int, inputs: int, _: int) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, inputs), jnp.float8_e4m3fn) for count in (rows, outputs)]
    has_kernel = has_blocks(rows, given[1], 1)
    return lambda rows, matrix: multiply_codes(rows, matrix, jnp.bfloat16) if has_kernel else None, given


def gated(rows: int, outputs: int, inputs: int, _: int) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, inputs), jnp.float8_e4m3fn) for count in (rows, outputs)]
    scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 1), (outputs,))]
    run = gated_codes if rows <= MOST_ROWS else many_gated_codes
    return (
        lambda rows, matrix, row_scales, column_scales: run(rows, row_scales, matrix, column_scales, jnp.bfloat16),
        (*given, *scales),
    )


def scaled(rows: int, outputs: int, inputs: int, _: int) -> tuple[Callable[..., Any], Any]:
    given = [jax.ShapeDtypeStruct((count, inputs), jnp.float8_e4m3fn) for count in (rows, outputs)]
    scales = jax.ShapeDtypeStruct((inputs // BLOCK, rows), jnp.float32)
    run = code_product if rows <= MOST_ROWS else many_scaled_product
    return lambda rows, matrix, scales: run(rows, matrix, jnp.bfloat16, scales), (*given, scales)


KERNELS = {"four_bits": four_bits, "codes": codes, "gated": gated, "scaled": scaled}


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
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(place)
        compile_for_h200(*KERNELS[options.kernel](options.rows, *map(int, options.shape.split("x")), options.group))
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
