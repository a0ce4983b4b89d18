"""A compiler whose programs do nothing, and note that they are made and run."""

from collections.abc import Callable
from threading import Event
from typing import Any

from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key, kind_of
from quire.executor.programs.store import ProgramStore
from quire.executor.sample.sampler import Sampled
from quire.executor.shapes import Shapes
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.executor.rig import config_of
from tests.models.tiny import NamedTensors
from tests.patience import WAIT_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class RecordedCompiler(Compiler):
    """Programs for which `waits` holds are made when `may_go_on` is set; others at once. `times`: XLA times the
    products of decodes."""

    def __init__(
        self,
        shapes: Shapes,
        waits: Callable[[Key], bool] = lambda key: False,
        *,
        times: bool = False,
        store: ProgramStore | None = None,
    ) -> None:
        model = build_model(config_of("llama", num_hidden_layers=1))
        super().__init__(model, load_weights(model, NamedTensors(model), dtype="float32"), shapes, store=store)
        self._waits = waits
        self._times = times
        self.may_go_on, self.is_held = Event(), Event()
        self.made: list[Key] = []
        self.ran: list[Key] = []

    def make(self, key: Key) -> Any:
        kind = kind_of(key)
        if not kind.takes:  # of every start, and in no catalog
            return super().make(key)
        if self._waits(key):
            self.is_held.set()
            assert self.may_go_on.wait(WAIT_S)

        def run(*arguments: Any) -> Any:
            self.ran.append(key)
            if kind.replaces is None:
                return None
            same = arguments[kind.takes.index(kind.replaces)]
            return (same, Sampled(None)) if kind.has_results else same  # type: ignore[arg-type]

        self.made.append(key)
        return run

    def times_decodes(self, rows: int) -> bool:
        return self._times
