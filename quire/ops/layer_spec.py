"""The numbers of one layer, and its state during a step."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from quire.layer_kind import LayerKind
from quire.reach import Reach


class LayerSpec(ABC):
    """The constants of the part of a layer that sees other tokens. A spec is hashable: programs are made for it."""

    @property
    @abstractmethod
    def kind(self) -> LayerKind: ...

    def reach(self, longest: int) -> Reach:
        """The positions that a layer in pages reads in sequences of at most `longest`."""
        return None

    @property
    def allows_fresh_kernel(self) -> bool:
        """True if programs for new sequences compute the layer at least as fast as others do."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """True if a kernel reads the pages that several sequences share once for all of them."""
        return False


class LayerState(NamedTuple):
    """The state of a layer during a step."""

    arrays: Any  # of pages, or of slots: those that the layer writes
    access: Any  # the places of the step's tokens in them
