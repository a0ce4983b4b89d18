"""The metadata of a GGUF file that says how its model computes."""

import math
from typing import Any

from quire.errors import InvalidCheckpoint, UnsupportedModel, shown
from quire.files.gguf import GGUFHeader

MAX_INTEGER = 2**31 - 1
# Keys that describe and do not change the computation.
_DESCRIPTIVE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# Keys that change it, with the values that leave it as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
}


class MetadataKeys:
    """The metadata of one architecture. It records the keys that were read, so that the rest can be refused."""

    def __init__(self, header: GGUFHeader) -> None:
        self._path = header.path
        self._prefix = header.architecture + "."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }
        self._asked: set[str] = set()

    def get(self, key: str) -> Any:
        self._asked.add(key)
        value = self._values.get(key)
        if isinstance(value, list) and value and key != "attention.sliding_window_pattern":
            if any(item != value[0] for item in value):
                raise UnsupportedModel(f"{self._path}: {self._prefix}{key} differs between layers: {shown(value)}")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None, at_most: int = MAX_INTEGER) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            allowed = f"not a positive integer up to {at_most}"
            raise InvalidCheckpoint(f"{self._path}: {self._prefix}{key} is {shown(value)}, {allowed}")
        return value

    def whole(self, key: str, default: int) -> int:
        """An integer, zero included."""
        value = self.get(key)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidCheckpoint(f"{self._path}: {self._prefix}{key} is {shown(value)}, not a number that is finite")
        return float(f"{value:.7g}")  # written as a 32-bit float: 9.999999747378752e-06 was 1e-05

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise InvalidCheckpoint(f"{self._path}: {self._prefix}{key} is {value!r}, not a number above 0")
        return value

    def must_equal(self, key: str, expected: int) -> None:
        value = self.get(key)
        if value is not None and value != expected:
            raise UnsupportedModel(
                f"{self._path}: {self._prefix}{key} is {shown(value)}; only the head size {expected} is supported"
            )

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InvalidCheckpoint(f"{self._path}: {self._prefix}{key} is {shown(value)}, not true or false")
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Refuse the file unless the key is absent or has one of these values."""
        value = self.get(key)
        if value is not None and value not in supported:
            raise self.refuse(key, value, ", ".join(map(str, supported)))

    def refuse(self, key: str, value: Any, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: {self._prefix}{key} is {shown(value)}; supported: {supported}")

    def refuse_the_rest(self) -> None:
        for key, value in self._values.items():
            if key in self._asked or key in _DESCRIPTIVE or value in _NEUTRAL.get(key, ()):
                continue
            raise UnsupportedModel(f"{self._path}: metadata {self._prefix}{key} = {shown(value)} is not supported")
