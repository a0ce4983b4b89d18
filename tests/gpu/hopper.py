"""The GPUs for which kernels in Mosaic are written; elsewhere nothing of them runs, since nothing interprets them."""

import jax
import pytest

from quire.executor.compute_capability import compute_capability
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.hopper.mosaic import HAS_MOSAIC

IS_HOPPER = jax.default_backend() == "gpu" and compute_capability(jax.devices()[0]) == gpu_kernels.HOPPER
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_HOPPER and HAS_MOSAIC), reason="it is for GPUs of compute capability 9.0"),
]
