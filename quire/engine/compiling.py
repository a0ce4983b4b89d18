"""Prepares the processes that compile the programs of a deployment."""

import logging

import jax

from quire.cache_folder import cache_folder
from quire.engine.deployment import Deployment
from quire.executor.compile_processes import CompileProcesses
from quire.executor.compile_worker import CompileTask, structure
from quire.executor.draft import Draft
from quire.executor.memory import compiling_environment
from quire.executor.program_store import ProgramStore
from quire.models.params import ParamTree

log = logging.getLogger(__name__)

# Settings of JAX that programs depend on.
JAX_SETTINGS = ("jax_default_matmul_precision",)


def prepare_processes(deployment: Deployment, store: ProgramStore) -> CompileProcesses | None:
    """The processes, if there are to be any; those of a server on a GPU begin at once where nothing is kept, so that
    they have loaded JAX when there is something to do. On a CPU that would keep the engine from loading its own. None
    where nothing can be kept: they hand programs over on disk. None by default on a CPU that does not serve: its caller
    waits for the programs, and they are of a low priority."""
    count, on_gpu = deployment.resolved.compile_processes, deployment.facts.platform == "gpu"
    is_wanted = on_gpu or deployment.is_served or deployment.config.compile_processes is not None
    if not count or not is_wanted:
        return None
    if store.shared_timings() is None:
        log.info("nothing can be kept on disk, so threads compile in place of %d processes", count)
        return None
    # XLA compiles a CPU's programs for the processors that the process has.
    processes = CompileProcesses(count, compiling_environment(), shares_processors=on_gpu)
    if deployment.is_served and store.is_empty and on_gpu:
        processes.start()
    return processes


def compile_task(deployment: Deployment, weights: ParamTree, draft: Draft | None, store: ProgramStore) -> CompileTask:
    count, threads = deployment.resolved.compile_processes, deployment.resolved.compile_threads
    on_cpu = deployment.facts.platform == "cpu"
    return CompileTask(
        model=(deployment.files.config, structure(weights)),
        draft=(deployment.draft.files.config, structure(draft.weights)) if deployment.draft and draft else None,
        shapes=deployment.shapes,
        store=store.place,
        digest=store.digest,
        threads=max(1, threads // count),
        native_library=cache_folder(deployment.config.cache_dir) / "native" if on_cpu else None,
        settings={name: getattr(jax.config, name) for name in JAX_SETTINGS},
    )
