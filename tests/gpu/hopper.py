"""The GPUs for which kernels in Mosaic are written; elsewhere nothing of them runs, since nothing interprets them."""

import pytest

from quire.ops.gpu.capability import HOPPER, GpuCapability, this_gpu

ON_HOPPER = GpuCapability.of(HOPPER)  # with this JAX, wherever it runs
IS_HOPPER = this_gpu() == ON_HOPPER
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_HOPPER and ON_HOPPER.mosaic), reason="it is for GPUs of compute capability 9.0"),
]
