"""A format of quantised matrices: the tensors that stand for one, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.errors import InvalidCheckpoint
from quire.files.tensor_source import TensorInfo, TensorSource
from quire.models.formats.layout import CodedTensor, InputSide, Layout

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

FLOATS = ("float32", "float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Module:
    """The tensors of a checkpoint that belong to one linear layer, NAME.weight and others; or to all experts of a
    layer, NAME_blocks and NAME_scales."""

    name: str
    source: TensorSource
    is_stacked: bool = False  # the second

    def tensor(self, suffix: str) -> str:
        return f"{self.name}{'_' if self.is_stacked else '.'}{suffix}"

    @property
    def weight(self) -> str:
        """The name of the matrix that they stand for."""
        return self.name if self.is_stacked else f"{self.name}.weight"

    def has(self, suffix: str) -> bool:
        return self.tensor(suffix) in self.source.tensors()

    def info(self, suffix: str) -> TensorInfo:
        found = self.source.tensors().get(self.tensor(suffix))
        if found is None:
            raise InvalidCheckpoint(f"{self.tensor(suffix)} is missing, which its quantisation needs")
        return found

    def checked(self, suffix: str, shapes: Sequence[Shape], dtypes: Sequence[str]) -> TensorInfo:
        """A tensor that has one of these shapes and dtypes. Raises with its name otherwise."""
        info = self.info(suffix)
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(suffix, f"is {list(info.shape)}; by its quantisation it is {wanted}")
        if info.dtype not in dtypes:
            raise self.error(suffix, f"is {info.dtype}; by its quantisation it is {' or '.join(dtypes)}")
        return info

    def matrix(self, suffix: str, dtypes: Sequence[str]) -> TensorInfo:
        """A tensor of any two sizes above zero."""
        info = self.info(suffix)
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.error(suffix, f"is {list(info.shape)}; a matrix is needed")
        return self.checked(suffix, (info.shape,), dtypes)

    def read(self, suffix: str) -> Array:
        return self.source.read(self.tensor(suffix))

    def scales(self, suffix: str) -> Array:
        """Like `read`; raises for numbers that are not finite."""
        found = self.read(suffix)
        if not np.isfinite(found.astype(np.float32)).all():
            raise self.error(suffix, "has numbers that are not finite")
        return found

    def input_scale(self, suffix: str) -> Array:
        """float32 []: a scale that divides activations."""
        scale = self.scales(suffix).astype(np.float32).reshape(())
        if not scale > 0:
            raise self.error(suffix, f"is {scale:g}; activations are divided by it, so it must be above 0")
        return scale

    def index(self, suffix: str, group: int) -> Array | None:
        """The group of each input, all of which exist; None if the groups follow each other."""
        found = self.read(suffix)
        usual = np.arange(len(found)) // group
        if np.array_equal(found, usual):
            return None
        outside = found[(found < 0) | (found > usual[-1])]
        if len(outside):
            raise self.error(suffix, f"names group {outside[0]}; there are {usual[-1] + 1}")
        return found.astype(np.int32)

    def error(self, suffix: str, problem: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.tensor(suffix)} {problem}")


class Format(Protocol):
    """One way to store a matrix. Methods raise `InvalidCheckpoint` with the name of a tensor that does not fit."""

    def suffixes(self, module: Module) -> Sequence[str]:
        """The tensors that stand for the matrix; empty where the module is not quantised."""

    def layout(self, module: Module) -> tuple[int, Layout]:
        """Its outputs and its layout, from names, shapes and dtypes only."""

    def side(self, module: Module) -> InputSide:
        """Small arrays, which decide whether matrices can be joined."""

    def read(self, module: Module) -> CodedTensor: ...


class Quantization(Protocol):
    """The `quantization_config` of a checkpoint."""

    @property
    def summary(self) -> str:
        """A description for users: the method and its numbers."""

    @property
    def cache_dtype(self) -> str | None:
        """The type that keys and values are cached in, as `kv_cache_dtype` names it; None: it does not say."""

    def format_of(self, name: str) -> Format | None:
        """The format of a module that is stored quantised; None if it is not."""
