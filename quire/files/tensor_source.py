"""Where weights come from: named tensors, read one at a time."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # as numpy and ml_dtypes spell it: "float32", "bfloat16", …


class TensorSource(Protocol):
    """The tensors of one checkpoint, under their Hugging Face names and in Hugging Face layouts.

    Opening one reads headers only. `read` gives one tensor and keeps nothing of it, so that the memory in use is the
    caller's. What is read may be a view of a read-only mapped file.
    """

    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Array: ...
