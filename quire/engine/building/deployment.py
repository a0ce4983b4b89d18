"""Everything decided about running a model."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from quire.core.limits import Limits
from quire.engine.building.adapter_plan import AdapterPlan
from quire.engine.building.draft_plan import DraftPlan
from quire.executor.layer_state import PageLayout, page_layout
from quire.executor.shapes import Shapes
from quire.files.gguf_source import GGUFSource
from quire.files.model_files import ModelFiles
from quire.files.safetensors_source import SafetensorsSource
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.parts.decoder import Decoder
from quire.settings.choice import Choice
from quire.settings.config import Config
from quire.settings.memory import as_size
from quire.settings.resolve import Facts, Resolved

Checkpoint = GGUFSource | SafetensorsSource | QuantizedSource


@dataclass(frozen=True)
class Deployment:
    """Everything decided about running a model, before any weight is read."""

    config: Config
    files: ModelFiles
    source: Checkpoint | None  # None for random weights
    model: Decoder
    mesh: Mesh | None
    facts: Facts
    resolved: Resolved
    layout: PageLayout
    shapes: Shapes
    limits: Limits
    adapters: AdapterPlan
    is_served: bool  # to clients: all programs are made ahead of need
    choices: tuple[Choice[Any], ...]
    draft: DraftPlan | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in the layers of the model and of its draft."""
        return self.layout.page_bytes + (0 if self.draft is None else self._draft_page_bytes(self.draft))

    @property
    def page_numbers(self) -> int:
        """Numbers of one page on one device, in the largest array of the model and of its draft."""
        resolved, layouts = self.resolved, [self.layout]
        if self.draft is not None:
            layouts.append(self.draft.layout(resolved.page_size, resolved.max_total_tokens, resolved.page_dtype))
        return max(layout.page_numbers for layout in layouts)

    @property
    def slot_state_bytes(self) -> int:
        """Bytes of the state that all slots have beside pages, and of its snapshots, with padding, on one device."""
        snapshots = self.shapes.num_snapshots
        return self.layout.slot_bytes * (self.limits.max_batch_size + 1 + (snapshots + 1 if snapshots else 0))

    @property
    def host_page_bytes(self) -> int:
        """Bytes of one page on all devices together: a draft runs on one."""
        return self.layout.whole_page_bytes + (0 if self.draft is None else self._draft_page_bytes(self.draft))

    def _draft_page_bytes(self, draft: DraftPlan) -> int:
        resolved = self.resolved
        return draft.layout(resolved.page_size, resolved.max_total_tokens, resolved.page_dtype).page_bytes


def cache_capacity(deployment: Deployment) -> dict[str, str]:
    """The capacity of the cache, for the log and `quire doctor`."""
    limits, layout = deployment.limits, deployment.layout
    usable, longest = limits.num_pages - 1, limits.max_sequence_tokens
    held = limits.pages_of(longest)
    capacity = {
        "tokens in the cache": f"{limits.capacity_tokens:,}",
        "sequences at their longest": f"{usable // held:,} of {longest:,} tokens ({usable:,} pages / {held:,} each)",
    }
    if limits.host_pages:
        tokens = limits.host_pages // len(limits.page_groups) * limits.page_size
        size = as_size(limits.host_pages * limits.host_page_bytes)
        capacity["tokens in host memory"] = f"{tokens:,} ({limits.host_pages:,} pages, {size})"
    capacity["state of the layers"] = "; ".join(
        f"{kind}: {count} layer{'s' * (count > 1)}, {as_size(num_bytes)} a {unit}"
        for kind, count, num_bytes, unit in layout.kinds
    )
    if layout.slot_specs:
        snapshots = limits.snapshots or 0
        size = as_size(deployment.slot_state_bytes)
        capacity["state of all slots"] = f"{size}, with {snapshots:,} snapshots" if snapshots else size
    if any(layout.groups):
        layers, sizes = deployment.model.layers, (layout.page_size, longest, layout.dtype)
        undivided = page_layout(layers, *sizes, layout.mesh, 1, layout.page_dtype)
        without = limits.pages_for(longest) * undivided.page_bytes
        times = without / (held * layout.page_bytes)
        capacity["windows"] = f"{layout.rules}; {times:.1f}x as many sequences of {longest:,} tokens as without"
    return capacity
