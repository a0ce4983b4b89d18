"""The programs with products that XLA chooses by timing them."""

from quire.executor.programs.compiler import Compiler
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.order import OTHER_PRODUCTS
from quire.executor.programs.table import Key, size_of


class TimedPrograms:
    """Loading weights disturbs a timing, and so do steps. A product is timed once for all programs that have it."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.kept: frozenset[Key] = frozenset()  # on disk before any was made: to load them times nothing

    def is_timed(self, key: Key) -> bool:
        """True for a program of decodes whose products XLA times."""
        return key[0] == "decode" and key not in self.kept and self._compiler.times_decodes(size_of(key))

    def times(self, key: Key) -> bool:
        """True if XLA times products of this program that no other has timed."""
        is_step = not key.decodes_only if isinstance(key, StepShape) else key[0] in OTHER_PRODUCTS
        return self.is_timed(key) or (is_step and key not in self.kept and self._compiler.times_few(size_of(key)))

    def timed_for(self, key: Key) -> Key | None:
        """The program for as many decodes that times the products of this one; None where none does."""
        has_its_products = key.decodes_only if isinstance(key, StepShape) else key[0] in ("burst", "shared")
        first = ("decode", size_of(key))
        return first if has_its_products and self.is_timed(first) else None
