"""The kernels that a GPU runs, by its compute capability and the versions of JAX and Python."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from quire.ops.gpu.capability import ABSL, CUDNN, GpuCapability, compute_capability, this_gpu
from quire.ops.gpu.kernels import GPU, GPU_WITHOUT_FP8, gpu_kernels

NEW, OLD = {"jax": (0, 11), "python": (3, 12)}, {"jax": (0, 10), "python": (3, 11)}


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        (GpuCapability(9.0, **NEW), "mosaic code_product packed_attention prompt_in_codes"),
        (GpuCapability(9.0, **OLD), "code_product"),
        (GpuCapability(9.0, **OLD, absent=frozenset({ABSL})), ""),
        (GpuCapability(9.0, **NEW, absent=frozenset({CUDNN})), "mosaic code_product"),
        (GpuCapability(9.0, (0, 12), (3, 13)), "packed_attention prompt_in_codes"),
        (GpuCapability(8.6, **NEW), "packed_attention"),
        (GpuCapability(10.0, **NEW), "packed_attention"),
        (GpuCapability(None, **NEW), "packed_attention"),
    ],
    ids=str,
)
def test_kernels_run_where_their_gpu_and_their_jax_are(capability: GpuCapability, runs: str) -> None:
    names = ("mosaic", "code_product", "packed_attention", "prompt_in_codes")
    assert {name for name in names if getattr(capability, name)} == {*runs.split()}
    kernels = gpu_kernels(capability)
    assert (kernels.prompt_in_codes is not None) == capability.prompt_in_codes
    assert (kernels.max_fresh_sequences > 1) == capability.packed_attention
    products = kernels.products
    assert (products.product is not None) == capability.code_product
    assert (products.few_rows is not None) == (products.gated_product is not None) == capability.mosaic


def test_what_an_old_python_costs_is_said_with_the_remedy() -> None:
    text = str(GpuCapability(9.0, **OLD))
    assert text.startswith("with compute capability 9.0, JAX 0.10, Python 3.11, all except attention over pages of ")
    assert "cuDNN's attention to several new prompts at once and in e4m3 (from JAX 0.11 on)" in text
    assert text.endswith("Remedy: Python 3.12 or newer, which JAX 0.11 needs, and pip install 'quire[cuda]'")
    assert GpuCapability(9.0, (0, 10), (3, 12)).remedy() == "pip install 'quire[cuda]'"


def test_nothing_is_missing_on_hopper_with_its_jax() -> None:
    assert str(GpuCapability(9.0, **NEW)) == "all, with compute capability 9.0, JAX 0.11, Python 3.12"
    assert GpuCapability(9.0, **NEW).remedy() is None


def test_what_a_gpu_cannot_run_has_no_remedy() -> None:
    text = str(GpuCapability(7.5, **NEW))
    assert "those written in Mosaic (for compute capability 9.0)" in text
    assert "latent attention (from compute capability 8.0 on)" in text
    assert "Remedy" not in text


@pytest.mark.parametrize("compute", [None, 8.6, 8.9, 9.0, 12.0])
def test_e4m3_needs_a_gpu_that_converts_it(compute: float | None) -> None:
    capability = GpuCapability(compute, **NEW)
    kernels = gpu_kernels(capability)
    if compute == 8.6:
        assert capability.fp8_refusal == "needs compute capability 8.9; this GPU has 8.6"
        assert kernels.experts is GPU_WITHOUT_FP8.experts
    else:
        assert capability.fp8_refusal is None
        assert kernels.experts is GPU.experts


def test_other_devices_have_no_capability_of_a_gpu() -> None:
    assert (this_gpu() is None) == (jax.default_backend() != "gpu")


@pytest.mark.parametrize(("stated", "known"), [("8.6", 8.6), ("12.0", 12.0), ("gfx942", None), (None, None)])
def test_the_capability_of_other_devices_is_unknown(stated: str | None, known: float | None) -> None:
    device: Any = SimpleNamespace() if stated is None else SimpleNamespace(compute_capability=stated)
    assert compute_capability(device) == known
