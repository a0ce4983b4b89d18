"""The part of a layer that sees other tokens: attention, or what a layer has in its place."""

from typing import Any, Protocol, Self

from quire.models.context import PlatformOps
from quire.models.params import ParamTree
from quire.models.parts.rope import Rope
from quire.models.parts.temperature import QueryTemperature
from quire.ops.layer_spec import LayerSpec
from quire.ops.weights.rounded_rows import BlockOutput, Rows


class Mixer(Protocol):
    @property
    def spec(self) -> LayerSpec:
        """Its state follows from it."""

    @property
    def rope(self) -> Rope | QueryTemperature | None:
        """The source of all that it knows about positions."""

    def params(self) -> ParamTree: ...

    def __call__(
        self, weights: ParamTree, x: Rows, rotation: Any, state: Any, ops: PlatformOps
    ) -> tuple[BlockOutput, Any]:
        """Its output [t, d] for x [t, d], and its state after these tokens. `rotation` is that of its rope."""

    def for_devices(self, num_devices: int) -> Self:
        """The same function with weights that so many devices can share."""
