"""Engines for the chaos tests: builders that travel to the engine process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.ipc.messages import Described
from quire.server.observe.logs import configure_logs
from quire.server.processes.model_engine import ModelEngine
from quire.settings.config import Config
from tests.chaos.faulty import Faults
from tests.core.harness import limits
from tests.fake_executor import FakeExecutor


@dataclass(frozen=True)
class FakeModel:
    """Its tokens can be worked out by hand. `tokenizer` is a folder; a start takes `build_s` and a step `step_s`.

    It starts once the file `builds_after` is there.
    """

    tokenizer: Path
    step_s: float = 0.0
    faults: Faults = Faults()
    max_queued: int | None = None
    build_s: float = 0.0
    max_burst: int = 1
    builds_after: str | None = None

    def __call__(self, describe: Callable[[Described], None]) -> Engine:
        configure_logs("text")
        time.sleep(self.build_s)
        while self.builds_after is not None and not Path(self.builds_after).exists():
            time.sleep(0.02)
        describe(Described("fake", str(self.tokenizer), (), {}))
        chosen = limits(num_pages=1200, max_batch_size=16, max_sequence_tokens=512, max_step_tokens=272,
                        max_batch_prefill_tokens=256, max_queued=self.max_queued, max_burst=self.max_burst)  # fmt: skip

        def take_time(plan: object, prompts: object) -> None:
            executor.plans.clear()  # which tests of single steps look at, and hours of them would fill the memory
            time.sleep(self.step_s)

        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, take_time)
        return Engine(Scheduler(chosen, time.monotonic), self.faults(executor))


@dataclass(frozen=True)
class FaultyModel:
    """A model's engine, with faults."""

    config: Config
    faults: Faults

    def __call__(self, describe: Callable[[Described], None]) -> Engine:
        engine = ModelEngine(self.config, show_progress=False)(describe)
        engine.executor = self.faults(engine.executor)
        return engine
