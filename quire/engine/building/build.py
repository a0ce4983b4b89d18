"""Builds the engine of a deployment: its weights, programs, executor and scheduler."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from quire.core.scheduler import Scheduler
from quire.engine.building.compiling import (
    begin_programs,
    begins_early,
    compile_task,
    make_programs,
    prepare_processes,
    program_store,
)
from quire.engine.building.deployment import Deployment, cache_capacity
from quire.engine.building.model_weights import load_draft, load_model
from quire.engine.building.page_count import first_store, with_measured_step
from quire.engine.engine import Engine
from quire.engine.group import Group, GroupFaults
from quire.executor.executor import JaxExecutor
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.programs import Programs
from quire.executor.programs.replay import Follower, Members
from quire.files.progress import Progress, silent
from quire.grammar.matcher import Grammars
from quire.ops.gpu.capability import this_gpu
from quire.ops.native import library
from quire.settings.group import shared_settings
from quire.settings.machine import container_limits
from quire.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """An engine with its executor, and the deployment with the numbers that were measured."""

    deployment: Deployment
    engine: Engine
    executor: JaxExecutor

    def warm_up(self) -> Iterator[float]:
        """Compile the programs, telling the share done. Afterwards the scheduler knows the good sizes of steps. Where
        it is left off, the rest is done while the engine is idle, and prompts are cut for the programs that there
        are."""
        limits = self.engine.step_limits
        limits.step_sizes = lambda: self.executor.programs.step_sizes

        def warm_up_more() -> float | None:
            wait_s = self.executor.warm_up_more()
            limits.update_sizes()
            return wait_s

        self.engine.idle_work = warm_up_more
        yield from self.executor.warm_up()
        self.engine.idle_work = None
        limits.update_sizes()


class Others(Members, Group, Protocol):
    """The other members of a leader's group."""

    def deploy(self, settings: dict[str, Any], sizes: str) -> None:
        """Let them load the model with these settings, which lead to these sizes."""


def build_engine(
    deployment: Deployment,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
    others: Others | None = None,
) -> Built:
    """Load the weights and build the engine. `Built.warm_up` compiles the programs. `others`: those of its group."""
    with ExitStack() as undo:  # ends processes and threads if anything fails
        processes = prepare_processes(deployment, first_store(deployment)) if others is None else None
        if processes is not None:
            undo.callback(processes.close)
        built = _build_engine(deployment, progress, clock, others, processes, undo)
        undo.pop_all()
        return built


def _build_engine(
    deployment: Deployment,
    progress: Progress,
    clock: Callable[[], float],
    others: Others | None,
    processes: CompileProcesses | None,
    undo: ExitStack,
) -> Built:
    def measure() -> tuple[Deployment, Programs | None]:
        measured = with_measured_step(deployment)
        if others is not None:
            others.deploy(shared_settings(measured.config, measured.choices), str(measured.shapes))
        elif begins_early(measured):
            return measured, begin_programs(measured, processes, undo)
        return measured, None

    with ThreadPoolExecutor(1) as pool:  # its thread waits for a compiler, this one for files
        measuring = pool.submit(measure)
        weights, draft = load_model(deployment, progress), load_draft(deployment, progress)
        deployment, programs = measuring.result()
    log.debug("weights are loaded")
    _log_facts(deployment)
    store = program_store(deployment)
    store.forget_unused()
    if programs is not None:
        programs.set_weights(weights, draft)
    else:
        if processes is not None:
            processes.begin(compile_task(deployment, weights, draft, store))
        programs = make_programs(deployment, weights, draft, store, processes, others)
    if deployment.is_served:
        programs.load_kept()
    executor = JaxExecutor(programs, deployment.limits.host_pages)
    return Built(deployment, _engine(deployment, executor, clock, others), executor)


def _engine(deployment: Deployment, executor: JaxExecutor, clock: Callable[[], float], others: Others | None) -> Engine:
    model = deployment.model
    scheduler = Scheduler(deployment.limits, clock, model.prefix_key, model.switch_length)
    scheduler.budget.fixed_tokens = deployment.resolved.fixed_tokens
    scheduler.budget.padded_sizes = deployment.shapes.ladder.padded_sizes
    engine = Engine(
        scheduler,
        executor,
        deployment.config.lookahead,
        _grammars(deployment),
        max_burst_s=deployment.resolved.max_burst_ms / 1000,
        max_step_s=deployment.resolved.max_step_ms / 1000,
        clock=clock,
        read_adapter=deployment.adapters.reader(deployment.model),
    )
    if others is not None:
        engine.group = others
        engine.judge(GroupFaults(others))
    engine.adapters.root = deployment.config.adapter_folder
    for name, folder in deployment.adapters.folders.items():
        engine.adapters.load(name, str(folder))
    return engine


def _log_facts(deployment: Deployment) -> None:
    if (allowed := container_limits()) is not None:
        log.info("this container has %s", allowed)
    for choice in deployment.choices:
        if choice.is_automatic:
            log.info("%s", choice)
    log.info("%s", "; ".join(f"{name}: {value}" for name, value in cache_capacity(deployment).items()))
    if deployment.facts.platform == "cpu":
        log.info("native library: %s", library.description())
    if (gpu := this_gpu()) is not None:
        log.log(logging.INFO if gpu.remedy() is None else logging.WARNING, "GPU kernels: %s", gpu)


def build_follower(deployment: Deployment, progress: Progress = silent) -> Follower:
    """Load the weights of a member that runs what its leader announces."""
    weights = load_model(deployment, progress)
    store = program_store(deployment)
    store.forget_unused()
    compiler = Compiler(deployment.model, weights, deployment.shapes, deployment.mesh, store)
    return Follower(compiler, deployment.resolved.compile_threads)


def _grammars(deployment: Deployment) -> Grammars | None:
    path = deployment.files.tokenizer
    if path is None:
        return None
    return Grammars(lambda: load_tokenizer(path), deployment.files.eos_token_ids, deployment.model.vocab_size)
