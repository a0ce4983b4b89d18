"""The facts that settings are decided by: the machine, its devices, and the sizes of a model."""

from typing import Any

import jax
from jax.sharding import Mesh

from quire.engine.building.deployment import Checkpoint
from quire.engine.building.draft_plan import DraftPlan
from quire.executor.host.pinned_pages import can_pin
from quire.executor.memory import device_memory_bytes, outside_bytes, reserved_fraction, weight_sizes
from quire.files.cache_folder import cache_folder
from quire.files.tensor_source import TensorSource
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.parts.decoder import Decoder
from quire.ops.gpu.capability import this_gpu
from quire.ops.native import int8_product, library
from quire.ops.native.building import PARTS
from quire.settings.config import Config
from quire.settings.dtypes import resolve_dtype, resolve_quantize
from quire.settings.resolve import Facts


def facts_of(
    config: Config,
    model: Decoder,
    mesh: Mesh | None,
    draft: DraftPlan | None,
    source: Checkpoint | None,
    host_bytes: int,
) -> Facts:
    """`host_bytes`: the engine's share of the memory of the host."""
    platform, device, gpu = jax.default_backend(), jax.local_devices()[0], this_gpu()
    dtype = resolve_dtype(platform, config.dtype).value
    if dtype == "float32" and platform == "gpu":  # else products would be rounded to ten bits
        jax.config.update("jax_default_matmul_precision", "highest")  # type: ignore[no-untyped-call]
    if platform == "cpu":
        library.load(cache_folder(config.cache_dir) / "native")
    fast_int8 = platform == "cpu" and int8_product.is_fast()
    is_native = platform == "cpu" and mesh is None and dtype == "float32" and library.load()
    if config.reproducible:  # any part that is missing would be XLA's
        is_native = is_native and all(map(library.need, PARTS))
    stored = source.quantization if isinstance(source, QuantizedSource) else None
    quantization = None if stored is None else stored.summary
    quantize: Any = resolve_quantize(platform, config, fast_int8, quantization).value
    models: list[tuple[Decoder, TensorSource | None]] = [(model, source)]
    if draft is not None:
        models.append((draft.model, draft.source))
    sizes = [
        weight_sizes(each, of if isinstance(of, QuantizedSource) else None, dtype, quantize, mesh, is_native)
        for each, of in models
    ]
    return Facts(
        platform=platform,
        num_devices=len(jax.devices()),
        memory_bytes=host_bytes if platform == "cpu" else device_memory_bytes(device),
        host_bytes=host_bytes,
        fp8_refusal=None if gpu is None else gpu.fp8_refusal,
        outside_bytes=outside_bytes(device, is_shared=config.memory_fraction is not None),
        reserved_fraction=reserved_fraction(),
        max_positions=model.max_positions,
        weight_bytes=sum(size.num_bytes for size in sizes),
        widened_weight_bytes=max(size.widened_bytes for size in sizes),
        fast_int8=fast_int8,
        quantization=quantization,
        cache_dtype=None if stored is None else stored.cache_dtype,
        pins_memory=config.host_cache_gib > 0 and can_pin(),
        is_native=is_native,
    )
