"""Decides how a model runs, and builds its engine."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from quire.core.scheduler import Scheduler
from quire.engine.building.built import Built
from quire.engine.building.compiling import begin_programs, begins_early, compile_task, prepare_processes, program_store
from quire.engine.building.deployment import Checkpoint, Deployment, cache_capacity, kinds_of, layout_of
from quire.engine.building.draft_plan import DraftPlan, find_draft, refuse_what_cannot_draft
from quire.engine.building.model_weights import load_draft, load_model
from quire.engine.building.page_count import estimated_step_bytes, first_store, with_measured_step, with_pages
from quire.engine.building.shared_settings import shared_settings
from quire.engine.building.sizes import limits_of, shapes_of
from quire.engine.building.slot_state import refuse_what_needs_older_state
from quire.engine.engine import Engine
from quire.engine.group import Group, GroupFaults
from quire.errors import InvalidSetting
from quire.executor.executor import JaxExecutor
from quire.executor.memory import (
    device_memory_bytes,
    outside_bytes,
    reserve_device_memory,
    reserved_fraction,
    weight_sizes,
)
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.programs import Programs
from quire.executor.programs.replay import Follower, Members
from quire.files.cache_folder import cache_folder
from quire.files.model_files import ModelFiles, locate
from quire.files.progress import Progress, silent
from quire.files.tensor_source import TensorSource
from quire.grammar.matcher import Grammars
from quire.models.adapter_plan import plan_adapters
from quire.models.checkpoint import stored_names
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model
from quire.models.stored_head import with_stored_head
from quire.ops.gpu.capability import this_gpu
from quire.ops.native import int8_product, library
from quire.ops.native.building import PARTS
from quire.ops.sharding import tensor_mesh
from quire.settings.choice import Choice, chosen
from quire.settings.config import Config
from quire.settings.machine import container_limits, limit_threads, memory_bytes
from quire.settings.reproducible import refuse_kinds
from quire.settings.resolve import (
    Facts,
    Resolved,
    resolve,
    resolve_dtype,
    resolve_max_queued,
    resolve_max_step_ms,
    resolve_quantize,
)
from quire.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

SERVED_BURST_MS, OFFLINE_BURST_MS = 10.0, 50.0

# Called once the model's files are known and before JAX has looked for devices.
Meet = Callable[[ModelFiles, Config], Config]


class Others(Members, Group, Protocol):
    """The other members of a leader's group."""

    def deploy(self, settings: dict[str, Any], sizes: str) -> None:
        """Let them load the model with these settings, which lead to these sizes."""


def plan_deployment(
    config: Config,
    progress: Progress = silent,
    *,
    files: ModelFiles | None = None,
    is_served: bool = False,
    meet: Meet | None = None,
    num_engines: int = 1,
) -> Deployment:
    """Find the model's files, unless given, and decide whether and how it fits. `is_served`: to clients, so queue and
    steps have bounds. `meet` finds the other processes of a group, and returns the settings that all of them have.
    `num_engines` of this server share the memory of the host."""
    files = files or locate(**config.place_of_model, progress=progress)
    source = open_checkpoint(files)
    files = with_stored_head(files, source)
    model = build_model(files.config)
    _refuse_more_tokens(config, files, model)
    if source is not None:  # before memory is taken for what the config says
        stored_names(model, source)
    reserve_device_memory(config.host_cache_gib, config.memory_fraction)
    limit_threads()
    if meet is not None:
        config = meet(files, config)
    mesh = tensor_mesh(jax.devices()[: config.tensor_parallel]) if config.tensor_parallel > 1 else None
    model = model if mesh is None else model.for_devices(mesh.size)
    draft = find_draft(config, files, model, progress)
    facts = _facts(config, model, mesh, draft, source, memory_bytes() // num_engines)
    resolved = resolve(config, facts, is_served)
    adapters = plan_adapters(config, model, resolved, mesh)
    if meet is not None and adapters.sizes.slots:
        raise InvalidSetting("adapters are not supported by an engine of several processes (--group-size)")
    facts = replace(facts, weight_bytes=facts.weight_bytes + adapters.num_bytes)
    layout = layout_of(model, resolved, mesh)
    if draft is not None:
        refuse_what_cannot_draft(draft, layout, files, resolved.max_total_tokens)
    if resolved.fixed_order:
        refuse_kinds(kinds_of(model, layout), files.name)
    if layout.slot_specs:
        refuse_what_needs_older_state(config, len(layout.slot_specs), files.name)
    bounds = _bounds(config, resolved, facts, is_served)
    limits = replace(limits_of(config, resolved, layout, bounds.max_queued), max_loras=adapters.sizes.slots)
    shapes = replace(shapes_of(model, mesh, facts, resolved, layout, limits), adapters=adapters.sizes)
    deployment = Deployment(
        config=config,
        files=files,
        source=source,
        model=model,
        mesh=mesh,
        facts=facts,
        resolved=resolved,
        layout=layout,
        shapes=shapes,
        limits=limits,
        adapters=adapters,
        max_step_ms=bounds.max_step_ms,
        max_burst_ms=bounds.max_burst_ms,
        is_served=is_served,
        choices=(*resolved.choices, *adapters.choices, *bounds.choices),
        draft=draft,
    )
    return with_pages(deployment, estimated_step_bytes(deployment))


def _refuse_more_tokens(config: Config, files: ModelFiles, model: Decoder) -> None:
    """Raise where the tokenizer that is named has tokens that the model does not know."""
    if config.tokenizer is None or files.tokenizer is None:
        return
    count = load_tokenizer(files.tokenizer).vocab_size
    if count > model.vocab_size:
        raise InvalidSetting(
            f"tokenizer {config.tokenizer} has {count} tokens, {files.name} has {model.vocab_size}: it is of another "
            "model"
        )


def _facts(
    config: Config,
    model: Decoder,
    mesh: Mesh | None,
    draft: DraftPlan | None,
    source: Checkpoint | None,
    host_bytes: int,
) -> Facts:
    platform, device, gpu = jax.default_backend(), jax.local_devices()[0], this_gpu()
    dtype = resolve_dtype(platform, config.dtype).value
    if dtype == "float32" and platform == "gpu":  # else products would be rounded to ten bits
        jax.config.update("jax_default_matmul_precision", "highest")  # type: ignore[no-untyped-call]
    if platform == "cpu":
        library.load(cache_folder(config.cache_dir) / "native")
    fast_int8 = platform == "cpu" and int8_product.is_fast()
    is_native = platform == "cpu" and mesh is None and dtype == "float32" and library.load()
    if config.reproducible:  # any part that is missing would be XLA's
        is_native = is_native and all(map(library.need, PARTS))
    stored = source.quantization if isinstance(source, QuantizedSource) else None
    quantization = None if stored is None else stored.summary
    quantize: Any = resolve_quantize(platform, config, fast_int8, quantization).value
    models: list[tuple[Decoder, TensorSource | None]] = [(model, source)]
    if draft is not None:
        models.append((draft.model, draft.source))
    sizes = [
        weight_sizes(one, its if isinstance(its, QuantizedSource) else None, dtype, quantize, mesh, is_native)
        for one, its in models
    ]
    return Facts(
        platform=platform,
        num_devices=len(jax.devices()),
        memory_bytes=host_bytes if platform == "cpu" else device_memory_bytes(device),
        host_bytes=host_bytes,
        fp8_refusal=None if gpu is None else gpu.fp8_refusal,
        outside_bytes=outside_bytes(device, is_shared=config.memory_fraction is not None),
        reserved_fraction=reserved_fraction(),
        max_positions=model.max_positions,
        weight_bytes=sum(size.num_bytes for size in sizes),
        widened_weight_bytes=max(size.widened_bytes for size in sizes),
        fast_int8=fast_int8,
        quantization=quantization,
        cache_dtype=None if stored is None else stored.cache_dtype,
        is_native=is_native,
    )


class _Bounds(NamedTuple):
    """Limits of queues and steps, and the choices that led to them."""

    max_queued: int | None
    max_step_ms: float
    max_burst_ms: float
    choices: list[Choice[Any]]


def _bounds(config: Config, resolved: Resolved, facts: Facts, is_served: bool) -> _Bounds:
    """Offline only the total time counts."""
    if not is_served:
        burst_ms = OFFLINE_BURST_MS if config.max_burst_ms is None else config.max_burst_ms
        return _Bounds(config.max_queued, config.max_step_ms or 0.0, burst_ms, [])
    queued = resolve_max_queued(config, resolved.max_batch_size)
    step = resolve_max_step_ms(config, facts.platform)
    reason = "so much later a new request may begin, and so far apart tokens may come"
    burst = chosen("max_burst_ms", config.max_burst_ms, SERVED_BURST_MS, reason)
    has_bursts = resolved.max_burst > 1
    return _Bounds(queued.value, step.value, burst.value, [queued, step, *([burst] if has_bursts else [])])


def build_engine(
    deployment: Deployment,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
    others: Others | None = None,
) -> Built:
    """Load the weights and build the engine. `Built.warm_up` compiles the programs. `others`: those of its group."""
    with ExitStack() as undo:  # what has begun ends if anything fails
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
    def begin() -> tuple[Deployment, Programs | None]:
        measured = with_measured_step(deployment)
        if others is not None:
            others.deploy(shared_settings(measured.config, measured.choices), str(measured.shapes))
        elif begins_early(measured):
            return measured, begin_programs(measured, processes, undo)
        return measured, None

    with ThreadPoolExecutor(1) as pool:  # one waits for a compiler, the other for files
        beginning = pool.submit(begin)
        weights, draft = load_model(deployment, progress), load_draft(deployment, progress)
        deployment, begun = beginning.result()
    log.debug("weights are loaded")
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
    threads, store = deployment.resolved.compile_threads, program_store(deployment)
    store.forget_unused()
    if processes is not None and begun is None:
        processes.begin(compile_task(deployment, weights, draft, store))
    executor = JaxExecutor(
        deployment.model, weights, deployment.shapes, threads, deployment.mesh, store, others, draft,
        loads_ahead=deployment.is_served, num_host_pages=deployment.limits.host_pages,
        processes=processes, programs=begun,
    )  # fmt: skip
    model = deployment.model
    scheduler = Scheduler(deployment.limits, clock, model.prefix_key, model.switch_length)
    scheduler.budget.fixed_tokens = deployment.resolved.fixed_tokens
    scheduler.budget.padded_sizes = deployment.shapes.ladder.padded_sizes
    engine = Engine(
        scheduler,
        executor,
        deployment.config.lookahead,
        _grammars(deployment),
        max_burst_s=deployment.max_burst_ms / 1000,
        max_step_s=deployment.max_step_ms / 1000,
        clock=clock,
        read_adapter=deployment.adapters.reader(deployment.model),
    )
    if others is not None:
        engine.group = others
        engine.judge(GroupFaults(others))
    engine.adapters.root = deployment.config.adapter_folder
    for name, folder in deployment.adapters.folders.items():
        engine.adapters.load(name, str(folder))
    return Built(deployment, engine, executor)


def build_follower(deployment: Deployment, progress: Progress = silent) -> Follower:
    """Load the weights of a member that runs what its leader announces."""
    weights = load_model(deployment, progress)
    store = program_store(deployment)
    store.forget_unused()
    compiler = Compiler(deployment.model, weights, deployment.shapes, deployment.mesh, store)
    model = deployment.model
    return Follower(compiler, model.vocab_size, model.hidden_size, deployment.resolved.compile_threads)


def _grammars(deployment: Deployment) -> Grammars | None:
    path = deployment.files.tokenizer
    if path is None:
        return None
    return Grammars(lambda: load_tokenizer(path), deployment.files.eos_token_ids, deployment.model.vocab_size)
