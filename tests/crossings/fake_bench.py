"""Crossings on the fake executor, where every token can be worked out by hand."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from quire.core.limits import Limits
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.pages.folder_saves import FolderSaves
from quire.engine.pages.folder_source import FolderSource
from quire.engine.pages.store import PageReader, PageStore
from quire.engine.pages.traffic import PageTraffic
from quire.engine.port import Task
from quire.peers.bundle import PageForm
from quire.request import FinishReason, Request
from tests.crossings.bench import Faults
from tests.crossings.engine_setup import PAGE_SIZE, EngineSetup
from tests.crossings.front_end import Answer
from tests.engine.toy_grammars import ToyGrammars, guide
from tests.fake_executor import FakeExecutor, expected_logprobs, expected_prompt_logprobs, expected_tokens
from tests.fake_host_pages import PLACE_BYTES
from tests.patience import WAIT_S
from tests.peers.engines import folder_of


class SavesInTurn(FolderSaves):
    """Writes between the driver's turns, on the thread that takes them."""

    def start(self, run: Callable[[Task], None]) -> None:
        self._reader = PageReader(self._store, lambda task: task.run())

    def write(self) -> None:
        while not self._waiting.empty():
            self.counters[self._write(self._waiting.get(), self._reader)] += 1


class FakeBench:
    """Engines of one crossing. `guess_percent` of guesses are right. `root`: a folder for pages."""

    replacement = "77"
    _count = 0

    def __init__(self, root: Path, guess_percent: int = 60) -> None:
        self._guess_percent = guess_percent
        FakeBench._count += 1
        self._folder = lambda: folder_of(root, key=f"{FakeBench._count:032x}")
        self._sources: list[FolderSource] = []
        self._saves: list[SavesInTurn] = []

    def close(self) -> None:
        for source in self._sources:
            source._prompts.shutdown()  # those under way end: what they log would be another crossing's
            source.close()

    def limits(self, setup: EngineSetup) -> Limits:
        return setup.as_limits()

    def engine(self, setup: EngineSetup, clock: Callable[[], float], faults: Faults) -> Engine:
        limits = self.limits(setup)
        executor = FakeExecutor(
            limits.num_pages,
            limits.page_size,
            limits.max_batch_size,
            faults.at_submit,
            faults.at_result,
            page_groups=limits.page_groups,
            guess_percent=self._guess_percent if limits.max_guesses else None,
            num_host_pages=limits.host_pages,
            num_snapshots=limits.snapshots,
            replays=limits.replays,
        )
        engine = Engine(
            Scheduler(limits, clock, setup.prefix_key, setup.switch_length),
            executor,
            setup.lookahead,
            ToyGrammars(),
            max_burst_s=setup.max_burst_s,
            max_step_s=setup.max_step_s,
            clock=clock,
            read_adapter=_weights if setup.adapters else None,
        )
        engine.adapters.root = Path("/")
        for number, name in enumerate(setup.adapters, start=1):
            engine.adapters.load(name, f"/{number}")
        if setup.keeps_folder:
            self._keep_pages(engine, limits)
        return engine

    def _keep_pages(self, engine: Engine, limits: Limits) -> None:
        folder = self._folder()
        folder.scan()
        form = PageForm(PAGE_SIZE, PAGE_SIZE * PLACE_BYTES, limits.page_groups)
        store, digest_of = PageStore(engine.scheduler, lambda: engine.executor, form), engine.adapters.digest_of
        source = FolderSource(folder, store, form, timeout_s=WAIT_S)
        saves = SavesInTurn(folder, store, form.page_bytes, digest_of, max_bytes_per_s=2**40)
        self._sources.append(source)
        self._saves = [saves]  # those of an engine that ended are lost
        engine.page_sources.keep(PageTraffic(source, store, form, digest_of), saves)

    def between_turns(self) -> None:
        for saves in self._saves:
            saves.write()

    def translated(self, request: Request) -> Request:
        return request

    def expected(self, setup: EngineSetup, request: Request, sample: int, folder: str | None) -> Answer:
        weights = 0 if folder is None else _weights(folder)
        how = {} if request.grammar is None else {"guide": partial(guide, request.grammar)}
        tokens = expected_tokens(request, sample, adapter=weights, **how)
        return Answer(
            tokens,
            expected_logprobs(request, tokens, weights),
            expected_prompt_logprobs(request, weights),
            _finish(request, tokens),
        )

    def check_answer(self, request: Request, sample: int, found: Answer, expected: Answer) -> None:
        assert found.finish is expected.finish
        if request.sampling.logprobs is not None:
            assert found.logprobs == expected.logprobs
        if request.prompt_logprobs is not None and not sample:
            assert found.prompt_logprobs == expected.prompt_logprobs

    def left_behind(self, engine: Engine) -> Iterator[str]:
        assert isinstance(engine.executor, FakeExecutor)
        grammars = engine._masks._grammars
        assert isinstance(grammars, ToyGrammars)
        if grammars.num_live:
            yield f"{grammars.num_live} matchers"
        if len(engine.executor.adapters) != len(engine.adapters.folders):
            yield f"adapters on the host: {engine.executor.adapters}; named are {engine.adapters.folders}"


def _weights(folder: str) -> int:
    """Folders of adapters are numbers, and so are weights."""
    return int(folder.removeprefix("/"))


def _finish(request: Request, tokens: list[int]) -> FinishReason:
    if tokens and len(tokens) >= request.min_tokens:
        if tokens[-1] in request.end_ids and not request.ignore_end:
            return FinishReason.END
        if tokens[-1] in request.stop_ids:
            return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH
