"""The kernels of each platform, and the forms of weights that they read."""

from jax.sharding import Mesh

from quire.errors import InvalidSetting
from quire.ops.attention.sharded import sharded
from quire.ops.attention.step_attention import PLAIN, Kernels
from quire.ops.gpu.capability import TRITON, GpuCapability
from quire.ops.native import attention as native_attention
from quire.ops.native import library
from quire.ops.native.adapter_product import add_products as native_adapter_product
from quire.ops.native.norms import NATIVE as NATIVE_NORMS
from quire.ops.native.recurrence import NATIVE as NATIVE_RECURRENT
from quire.ops.native.sampling import filter_cuts, highest
from quire.ops.sampling_kernels import SamplingKernels
from quire.ops.weights.four_bit_experts import FourBitExperts
from quire.ops.weights.weight import Weight

NATIVE = Kernels(
    native_attention.place,
    native_attention.tiled_attention,
    norms=NATIVE_NORMS,
    decode_norms=NATIVE_NORMS,
    sampling=SamplingKernels(filter_cuts, highest),
    adapter_product=native_adapter_product,
    recurrent=NATIVE_RECURRENT,
    attend_latent=native_attention.tiled_attention,
    skips_padding=True,
)


def kernels_for(
    platform: str, dtype: str, mesh: Mesh | None = None, gpu: GpuCapability | None = None, fixed_order: bool = False
) -> Kernels:
    """The fastest kernels for a platform as JAX names it, on one device or on a mesh of devices.

    `gpu`: None: a GPU of unknown compute capability. `fixed_order`: kernels whose sums do not depend on other rows; on
    other platforms all kernels are so, or none.
    """
    kernels = _of_one_device(platform, dtype, gpu)
    if fixed_order and platform == "gpu":
        from quire.ops.gpu.fixed_order import with_fixed_order

        kernels = with_fixed_order(kernels)
    # The compiler partitions plain jnp by itself.
    return kernels if mesh is None or kernels is PLAIN else sharded(kernels, mesh)


def _of_one_device(platform: str, dtype: str, gpu: GpuCapability | None) -> Kernels:
    if platform == "cpu" and dtype == "float32" and library.load():
        return NATIVE
    if platform == "gpu":
        gpu = gpu or GpuCapability.of(None)
        if not gpu.triton:  # plain XLA would run in their place, several times slower
            raise InvalidSetting(
                f"the GPU kernels cannot be loaded: this jax has no {TRITON}. Remedy: pip install 'quire[cuda]', or "
                "JAX_PLATFORMS=cpu to run on the CPU"
            )
        from quire.ops.gpu.kernels import gpu_kernels

        return gpu_kernels(gpu)
    return PLAIN


def gpu_form(weight: Weight, *, is_alone: bool) -> Weight:
    """A weight as one GPU multiplies it, or as several do, between which XLA cuts its arrays."""
    if not is_alone:
        return weight.direct()
    from quire.ops.gpu.four_bit_product import GPUFourBits

    return weight.direct((GPUFourBits.of, FourBitExperts.of))
