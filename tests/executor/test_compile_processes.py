"""Processes that make programs: the engine loads the same ones, and makes them itself whatever becomes of a process."""

import logging
import operator
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from quire.executor.programs import compile_processes
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compile_worker import CompileTask, structure
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key, kind_of, size_of
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.store import ProgramStore
from quire.files.cache_folder import cache_folder
from quire.models.checkpoint import Quantize, load_weights, weights_like
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from tests.executor.recorded import RecordedCompiler
from tests.executor.rig import FEW_SHAPES, config_of
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors
from tests.patience import wait_until

CONFIG = config_of("llama", num_hidden_layers=1)
SHAPES = replace(FEW_SHAPES, max_prefill_tokens=8, max_sequence_tokens=64)
FALLS_BACK = "programs are compiled by threads, as the processes for it"
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def weights(model: Model) -> ParamTree:
    return load_weights(model, NamedTensors(model), dtype="float32")


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path, "a model")


@pytest.fixture
def started() -> Iterator[list[CompileProcesses]]:
    """All that a test starts, so that nothing of it stays."""
    made: list[CompileProcesses] = []
    yield made
    for processes in made:
        processes.close()


def task_of(weights: ParamTree, store: ProgramStore) -> CompileTask:
    where = cache_folder() / "native"
    return CompileTask((CONFIG, structure(weights)), None, SHAPES, store.place, store.digest, 2, where, {})


@pytest.fixture
def make_programs(
    model: Model, weights: ParamTree, store: ProgramStore, started: list[CompileProcesses]
) -> Iterator[Callable[..., Programs]]:
    made = []

    def make(processes: CompileProcesses, task: CompileTask | None = None) -> Programs:
        started.append(processes)
        processes.begin(task or task_of(weights, store))
        made.append(Programs(Compiler(model, weights, SHAPES, store=store), 2, processes=processes))
        return made[-1]

    yield make
    for programs in made:
        programs.close()


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or read
        return False


def ways(log: pytest.LogCaptureFixture) -> dict[str, int]:
    """How many programs were compiled here, and how many loaded."""
    words = [
        record.getMessage().split()[0] for record in log.records if record.name == "quire.executor.programs.compiler"
    ]
    return {way: words.count(way) for way in ("compiled", "loaded")}


def check_complete(programs: Programs) -> None:
    assert programs.num_unfinished == 0
    assert programs.table.keys == set(programs.catalog.keys)


def test_programs_that_processes_make_are_loaded_and_the_processes_end(
    make_programs: Callable[..., Programs], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = CompileProcesses(1)
    programs = make_programs(processes)
    compile_here = programs.compiler.compile

    def compile_first(key: Key) -> Any:
        assert key in programs.catalog.first, f"{key} is compiled here"
        return compile_here(key)

    monkeypatch.setattr(programs.compiler, "compile", compile_first)
    compiling = programs.compile_all()
    next(compiling)
    (process,) = processes.process_ids
    assert list(compiling)[-1] == 1.0
    check_complete(programs)
    assert processes.process_ids == []
    wait_until(lambda: not is_running(process))
    assert FALLS_BACK not in caplog.text


def test_no_process_is_started_for_programs_that_are_kept(
    model: Model, weights: ParamTree, store: ProgramStore, started: list[CompileProcesses]
) -> None:
    compiler = Compiler(model, weights, SHAPES, None, store)
    processes = CompileProcesses(1, command=("/no/such/command",))
    started.append(processes)
    compiler.make(("start", 1))
    assert compiler.is_kept(("start", 1))
    processes.want([])
    processes.start()
    assert processes.process_ids == []
    assert not processes.make(("start", 1))


def test_what_a_killed_process_has_not_made_is_compiled_by_threads(
    make_programs: Callable[..., Programs], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    processes = CompileProcesses(2)
    programs = make_programs(processes)
    for _ in programs.compile_all():
        if ways(caplog)["loaded"] and (left := processes.process_ids):
            with suppress(ProcessLookupError):  # it was killed before
                os.kill(left[0], signal.SIGKILL)
    check_complete(programs)
    made = ways(caplog)
    assert made["compiled"] > 0
    assert made["loaded"] > 0
    assert caplog.text.count(FALLS_BACK) == 1
    assert "have ended with status -9" in caplog.text


@pytest.mark.parametrize("command", [("/no/such/command",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_threads_compile_where_no_process_starts(
    make_programs: Callable[..., Programs], caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    programs = make_programs(CompileProcesses(2, command=command))
    for _ in programs.compile_for_prompt(4):
        pass  # nothing is asked of processes
    assert FALLS_BACK not in caplog.text
    for _ in programs.compile_all():
        pass
    check_complete(programs)
    assert ways(caplog)["loaded"] == 0
    assert caplog.text.count(FALLS_BACK) == 1


def test_a_process_with_other_devices_makes_nothing(
    make_programs: Callable[..., Programs],
    weights: ParamTree,
    store: ProgramStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs = make_programs(CompileProcesses(1), task_of(weights, store)._replace(digest="another"))
    for _ in programs.compile_all():
        pass
    check_complete(programs)
    assert caplog.text.count(FALLS_BACK) == 1
    assert "it has other devices than the engine" in caplog.text


def test_a_program_that_a_process_cannot_make_is_left_to_a_thread(
    weights: ParamTree, store: ProgramStore, started: list[CompileProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    processes = CompileProcesses(1)
    started.append(processes)
    processes.begin(task_of(weights, store))
    wrong: list[Key] = [StepShape(-number) for number in range(1, compile_processes.MAX_FAILED + 2)]
    processes.want([("start", 1), ("force", 64), *wrong])
    assert not processes.make(wrong[0])
    assert processes.make(("start", 1))
    assert caplog.text.count("a process could not make a program") == 1
    assert not any(map(processes.make, wrong[1:]))
    assert not processes.make(("force", 64))
    assert caplog.text.count(FALLS_BACK) == 1


def test_a_process_that_does_not_answer_is_not_waited_for(
    weights: ParamTree,
    store: ProgramStore,
    started: list[CompileProcesses],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_processes, "QUIET_S", 0.2)
    processes = CompileProcesses(1, command=SLEEPER)
    started.append(processes)
    processes.begin(task_of(weights, store))
    processes.want([("start", 1)])
    (process,) = processes.process_ids
    assert not processes.make(("start", 1))
    wait_until(lambda: not is_running(process))
    assert "have not answered for" in caplog.text


def test_threads_that_wait_for_a_process_end_with_their_programs(
    make_programs: Callable[..., Programs], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    programs = make_programs(CompileProcesses(1, command=SLEEPER))
    next(programs.compile_all())
    programs.close()
    wait_until(lambda: programs.num_unfinished == 0)
    assert ways(caplog)["compiled"] <= len(programs.catalog.first)
    assert FALLS_BACK not in caplog.text


START_AND_WAIT = """
import sys, time
from quire.executor.programs.compile_processes import CompileProcesses
processes = CompileProcesses(1)
processes.start()
print(*processes.process_ids, flush=True)
time.sleep(600)
"""


def test_a_killed_engine_leaves_no_process() -> None:
    engine = subprocess.Popen([sys.executable, "-c", START_AND_WAIT], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    process = int(engine.stdout.readline())
    assert is_running(process)
    engine.kill()
    engine.wait()
    engine.stdout.close()
    wait_until(lambda: not is_running(process))


@pytest.mark.parametrize("quantize", ["none", "int8", "fp8"])
def test_the_structure_of_weights_travels(quantize: Quantize) -> None:
    for name in CASES:
        model = build_model(config_of(name))
        like = weights_like(model, None, dtype="bfloat16", quantize=quantize)
        travelled: Any = pickle.loads(pickle.dumps(structure(like)))
        assert jax.tree.structure(travelled) == jax.tree.structure(like), name
        assert [(one.shape, one.dtype) for one in jax.tree.leaves(travelled)] == [
            (one.shape, one.dtype) for one in jax.tree.leaves(like)
        ], name


def test_weights_with_another_structure_than_the_one_that_programs_began_with_are_refused(
    model: Model, weights: ParamTree
) -> None:
    programs = Programs(Compiler(model, structure(weights), SHAPES), 1)
    programs.set_weights(weights, None)
    assert all(map(operator.is_, programs.weights, jax.tree.leaves(weights)))
    with pytest.raises(RuntimeError, match="another structure than was planned"):
        programs.set_weights(load_weights(model, NamedTensors(model), dtype="bfloat16"), None)
    programs.close()


def test_a_first_program_that_is_never_asked_for_does_not_keep_others_waiting_for_ever(
    started: list[CompileProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_processes, "QUIET_S", 0.2)
    processes = CompileProcesses(1, command=SLEEPER)
    started.append(processes)
    first, other = StepShape(8), StepShape(16)
    processes.want({first, other}, {first})
    assert not processes.make(other)  # a thread compiles it


class AskedFor(CompileProcesses):
    """Takes down what it is asked for, and makes nothing."""

    wanted: frozenset[Key] = frozenset()

    def want(self, keys: Collection[Key], first: Collection[Key] = ()) -> None:
        self.wanted = frozenset(keys)
        self.close()


class TimesFewRows(RecordedCompiler):
    def times_few(self, rows: int) -> bool:
        return rows <= 4


def test_processes_are_not_asked_for_programs_whose_products_xla_times(
    started: list[CompileProcesses], store: ProgramStore
) -> None:
    processes = AskedFor(1, command=SLEEPER)
    started.append(processes)
    compiler = TimesFewRows(replace(SHAPES, specialised=True), store=store)  # as on a GPU, the only one that times any
    programs = Programs(compiler, 1, processes=processes)
    for _ in programs.compile_all():
        pass
    programs.close()
    samples = {key for key in programs.catalog.keys if kind_of(key).samples}
    assert {size_of(key) for key in samples} == {4}
    assert samples.isdisjoint(processes.wanted)
    steps = {key.tokens for key in processes.wanted if isinstance(key, StepShape) and not key.decodes_only}
    assert steps
    assert min(steps) > 4
    assert processes.wanted >= {key for key in programs.catalog.keys if key[0] == "decode"}
