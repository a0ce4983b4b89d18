"""Builders of engines with the fake executor, for engine processes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import InvalidAdapter, UnsupportedModel
from quire.ipc.messages import Described, Waiting
from quire.server.processes.start_phase import StartPhase
from tests.core.harness import limits
from tests.fake_executor import POISON, FakeExecutor

HANG = POISON  # a prompt that holds this token never gets an answer


@dataclass(frozen=True)
class FakeEngine:
    """An EngineBuilder. `tokenizer` is the folder of a tokenizer."""

    tokenizer: Path
    step_s: float = 0.0
    refuses: bool = False
    build_s: float = 0.0
    builds_after: Path | None = None  # this file is there
    phases: tuple[str, ...] = ()  # of its start, before that
    adapters: Path | None = None  # a folder of adapters, of which `first` is there from the start

    def __call__(self, describe: Callable[[Described | Waiting], None]) -> Engine:
        if self.refuses:
            raise UnsupportedModel("the model has three heads; two are supported")
        start = StartPhase(lambda reason: describe(Waiting(reason)))
        for phase in self.phases:
            start.begin(phase)
        time.sleep(self.build_s)
        while self.builds_after is not None and not self.builds_after.exists():
            time.sleep(0.02)
        describe(Described("fake", str(self.tokenizer), (), {}))
        chosen = limits(num_pages=4000, max_batch_size=16, max_sequence_tokens=512, max_step_tokens=600,
                        max_batch_prefill_tokens=512, max_loras=2)  # fmt: skip
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, self._before_result)
        engine = Engine(Scheduler(chosen, time.monotonic), executor, read_adapter=read_adapter)
        if self.adapters is not None:
            engine.adapters.root = self.adapters
            engine.adapters.load("first", str(self.adapters / "first"))
        return engine

    def _before_result(self, plan: object, prompts: list[tuple[int, ...]]) -> None:
        while any(HANG in prompt for prompt in prompts):
            time.sleep(0.1)
        time.sleep(self.step_s)


def read_adapter(folder: str) -> str | int:
    """As far as an executor without numbers needs it: the folder, or the number in its config."""
    config = Path(folder, "adapter_config.json")
    if not config.is_file():
        raise InvalidAdapter(f"{folder}: there is no adapter_config.json")
    number: int | None = json.loads(config.read_text()).get("number")
    return folder if number is None else number
