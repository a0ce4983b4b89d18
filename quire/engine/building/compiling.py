"""Begins to compile the programs of a deployment."""

import hashlib
import json
import logging
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import jax

from quire.engine.building.deployment import Deployment
from quire.engine.building.model_weights import make_room_for_adapters, placement_of
from quire.executor.draft.draft import Draft
from quire.executor.host.pinned_pages import host_kinds
from quire.executor.memory import compiling_environment
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compile_worker import CompileTask, structure
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import kind_of
from quire.executor.programs.programs import Programs
from quire.executor.programs.replay import Members
from quire.executor.programs.store import ProgramStore
from quire.files.cache_folder import cache_folder
from quire.files.tensor_source import TensorSource
from quire.models.checkpoint import Quantize, weights_like
from quire.models.model import Model
from quire.models.params import ParamTree

log = logging.getLogger(__name__)

# Settings of JAX that programs depend on.
JAX_SETTINGS = ("jax_default_matmul_precision",)


def prepare_processes(deployment: Deployment, store: ProgramStore) -> CompileProcesses | None:
    """The processes, if there are to be any; those of a server on a GPU begin at once where nothing is kept, so that
    they have loaded JAX when there is something to do. On a CPU that would keep the engine from loading its own. None
    where nothing can be kept: they hand programs over on disk. None by default on a CPU that does not serve: its caller
    waits for the programs, and they are of a low priority. None where programs are compiled when they are used."""
    count, on_gpu = deployment.resolved.compile_processes, deployment.facts.platform == "gpu"
    is_wanted = on_gpu or deployment.is_served or deployment.config.compile_processes is not None
    if not count or not is_wanted or not deployment.config.compile_ahead:
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


def begins_early(deployment: Deployment) -> bool:
    """True where the programs of a server begin before its weights are loaded. On CPUs, loading may decide how they are
    packed."""
    return deployment.is_served and deployment.facts.platform != "cpu" and deployment.config.compile_ahead


def planned_weights(deployment: Deployment) -> tuple[ParamTree, Draft | None]:
    """The structure of weights that are not loaded yet, and that of the draft's."""
    resolved, plan = deployment.resolved, deployment.draft

    def like(model: Model, source: TensorSource | None) -> ParamTree:
        quantize, placement = cast(Quantize, resolved.quantize), placement_of(deployment)
        return weights_like(model, source, dtype=resolved.dtype, quantize=quantize, placement=placement)

    weights = like(deployment.model, deployment.source)
    make_room_for_adapters(weights, deployment)
    return weights, None if plan is None else Draft(plan.model, like(plan.model, plan.source))


def begin_programs(deployment: Deployment, processes: CompileProcesses | None, undo: ExitStack) -> Programs:
    """The programs of a deployment, which are made from now on; its weights may still be loaded. `undo` closes them."""
    (weights, draft), store = planned_weights(deployment), program_store(deployment)
    if processes is not None:
        processes.begin(compile_task(deployment, weights, draft, store))
    programs = make_programs(deployment, weights, draft, store, processes)
    undo.callback(programs.close)
    programs.begin()
    log.debug("programs have begun")
    return programs


def make_programs(
    deployment: Deployment,
    weights: ParamTree,
    draft: Draft | None,
    store: ProgramStore,
    processes: CompileProcesses | None,
    members: Members | None = None,
) -> Programs:
    """`members`: the others of a group, which run every program with this process."""
    compiler = Compiler(deployment.model, weights, deployment.shapes, deployment.mesh, store, draft)
    return Programs(compiler, deployment.resolved.compile_threads, members, _host_kinds(deployment), processes)


def _host_kinds(deployment: Deployment) -> tuple[str, ...]:
    return host_kinds(deployment.limits.host_pages, deployment.limits.restores_ahead)


def describe_programs(deployment: Deployment) -> str:
    """The number of programs, and their purposes."""
    looks_up = deployment.draft is None
    catalog = Catalog(deployment.shapes, _host_kinds(deployment), deployment.host_page_bytes, looks_up)
    counts = Counter(kind_of(key).purpose for key in catalog.keys)
    purposes = ", ".join(f"{count} for {purpose}" for purpose, count in counts.most_common())
    return f"{len(catalog.keys)}, of which a server begins with {len(catalog.first)}: {purposes}"


def program_store(deployment: Deployment) -> ProgramStore:
    """The compiled programs of this deployment on disk."""
    configs = [planned.files.config for planned in (deployment, deployment.draft) if planned is not None]
    config = json.dumps(configs, sort_keys=True, default=str)
    resolved, fast = deployment.resolved, deployment.facts.fast_int8
    numerics = f"{resolved.dtype} {resolved.quantize} {fast} {deployment.config.tensor_parallel}"
    shapes = replace(deployment.shapes, burst=1)  # one program depends on it, whose name has it
    identity = f"{config} {shapes} {numerics} {_digest_of_weights(deployment)}"
    return ProgramStore(cache_folder(deployment.config.cache_dir) / "programs", identity)


def _digest_of_weights(deployment: Deployment) -> str:
    """Of their structure, which in a quantised checkpoint follows from its files and not from its config alone: the
    types of scales, orders of inputs, the matrices that are left as they were."""
    weights, draft = planned_weights(deployment)
    trees = weights, None if draft is None else draft.weights
    arrays = [(array.shape, str(array.dtype)) for array in jax.tree.leaves(trees)]
    return hashlib.sha256(f"{jax.tree.structure(trees)} {arrays}".encode()).hexdigest()
