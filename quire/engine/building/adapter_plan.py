"""The adapters that a deployment begins with, and the room there is for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from quire.files.peft import locate_adapter, open_adapter
from quire.models.adapters import AdapterReader, AdapterSizes, check_adapter, num_bytes
from quire.models.model import Model
from quire.settings.adapters import adapter_places, resolve_max_lora_rank, resolve_max_loras
from quire.settings.choice import Choice
from quire.settings.config import Config
from quire.settings.resolve import Resolved


@dataclass(frozen=True)
class AdapterPlan:
    folders: dict[str, Path]  # of those that are there from the start, by name
    sizes: AdapterSizes
    num_bytes: int  # on one device
    choices: tuple[Choice[Any], ...]

    def reader(self, model: Model) -> AdapterReader | None:
        """A reader of adapters; None where there is no room for any."""
        return AdapterReader(model, self.sizes.rank, jnp.dtype(self.sizes.dtype)) if self.sizes.slots else None


def plan_adapters(config: Config, model: Model, resolved: Resolved, mesh: Mesh | None) -> AdapterPlan:
    """Find the adapters of a config. Raises for one that does not fit the model."""
    folders = {name: locate_adapter(place, **config.hub_access) for name, place in adapter_places(config).items()}
    opened = [open_adapter(folder) for folder in folders.values()]
    for adapter in opened:
        check_adapter(model, adapter)
    slots = resolve_max_loras(config, len(folders))
    if not slots.value:
        return AdapterPlan({}, AdapterSizes(), 0, ())
    rank = resolve_max_lora_rank(config, [adapter.rank for adapter in opened])
    dtype = "bfloat16" if resolved.quantize == "int8" else resolved.dtype
    sizes = AdapterSizes(slots.value, rank.value, dtype)
    return AdapterPlan(folders, sizes, num_bytes(model, sizes, mesh), (slots, rank))
