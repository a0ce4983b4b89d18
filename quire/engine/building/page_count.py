"""Counts the pages and the snapshots that fit in addition to weights and steps, and the pages of the host."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from quire.core.limits import Limits
from quire.engine.building.compiling import planned_weights, program_store
from quire.engine.building.deployment import Deployment
from quire.executor.memory import largest_step_bytes
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.store import ProgramStore
from quire.settings.choice import Choice
from quire.settings.host_cache import resolve_host_cache
from quire.settings.memory import SnapshotSizes, resolve_pages, resolve_snapshots

MEASURED_PAGES = 2  # pages are written in place, so their number does not matter to a step's memory
# Of the memory of pages, that the estimate of a step may take without being measured. So much is lost at most, and
# programs can be begun seconds earlier: the number of pages is a size of all of them.
SMALL_STEP = 0.04


def with_pages(deployment: Deployment, step_bytes: int) -> Deployment:
    """The deployment with as many pages as fit in addition to a step of `step_bytes` and the state of all slots."""
    deployment = with_snapshots(deployment, step_bytes)
    limits = deployment.limits
    longest, page_bytes = limits.pages_of(limits.max_sequence_tokens), deployment.page_bytes
    sizes = step_bytes, page_bytes, longest, deployment.slot_state_bytes, deployment.page_numbers
    pages = resolve_pages(deployment.config, deployment.resolved, deployment.facts, *sizes)
    others = [choice for choice in deployment.choices if choice.name != pages.name]
    return replace(
        deployment,
        shapes=deployment.shapes.with_pages(pages.value),
        limits=_with_host_pages(replace(limits, num_pages=pages.value), deployment),
        choices=(*others, pages),
    )


def with_snapshots(deployment: Deployment, step_bytes: int) -> Deployment:
    """The deployment with the snapshots of its slots' state that it has room for, besides a step of `step_bytes`."""
    layout, limits, config = deployment.layout, deployment.limits, deployment.config
    if not layout.slot_specs:
        return deployment
    longest = limits.pages_of(limits.max_sequence_tokens)
    sizes = SnapshotSizes(limits.max_batch_size, layout.slot_bytes, step_bytes, deployment.page_bytes, longest)
    snapshots = resolve_snapshots(config, deployment.resolved, deployment.facts, sizes)
    choices = [choice for choice in deployment.choices if choice.name not in ("snapshots", "prefix_caching")]
    choices.append(snapshots)
    if not snapshots.value:
        reason = f"{deployment.files.name} has {layout.slot_specs[0].kind.layers}, and there are no snapshots of them"
        choices.append(Choice("prefix_caching", False, f"{reason}: a prompt is computed from its first token on"))
    return replace(
        deployment,
        shapes=replace(deployment.shapes, num_snapshots=snapshots.value),
        limits=replace(limits, snapshots=snapshots.value, prefix_caching=config.prefix_caching and snapshots.value > 0),
        choices=tuple(choices),
    )


def _with_host_pages(limits: Limits, deployment: Deployment) -> Limits:
    """The limits with the host pages of the settings. All other numbers are final."""
    facts, page_bytes = deployment.facts, deployment.host_page_bytes
    free_bytes = facts.host_bytes
    if facts.platform == "cpu":
        free_bytes -= facts.weight_bytes + limits.num_pages * page_bytes
    pages_of_step = limits.pages_for(limits.max_batch_prefill_tokens) * len(limits.page_groups)
    config = deployment.config
    num_pages, saves, restores = resolve_host_cache(config, facts.platform, free_bytes, page_bytes, pages_of_step)
    return replace(
        limits,
        host_pages=num_pages,
        max_page_saves=saves,
        max_page_restores=restores,
        restores_ahead=num_pages > 0 and facts.pins_memory,
        host_page_bytes=page_bytes,
    )


def estimated_step_bytes(deployment: Deployment) -> int:
    """An upper estimate of the largest step. The model and its draft run one after the other."""
    models = [each.model for each in (deployment, deployment.draft) if each is not None]
    largest = max(largest_step_bytes(model, deployment.shapes) for model in models)
    return largest + deployment.facts.widened_weight_bytes


def measures_step(deployment: Deployment) -> bool:
    """Not on a CPU: its cache is small, to leave memory to the host, and does not fill what is left. And not where the
    estimate is small, if it is of a kind that was compared with what steps take."""
    if deployment.config.num_pages is not None or deployment.facts.platform == "cpu":
        return False
    resolved, shapes = deployment.resolved, deployment.shapes
    is_plain = resolved.quantize == "none" and not deployment.facts.quantization and deployment.mesh is None
    is_plain &= deployment.draft is None and not shapes.adapters.slots and not deployment.layout.slot_specs
    pages_bytes = deployment.limits.num_pages * deployment.page_bytes
    return not is_plain or estimated_step_bytes(deployment) > SMALL_STEP * pages_bytes


def with_measured_step(deployment: Deployment) -> Deployment:
    """The deployment with as many pages as fit in addition to the largest step, measured where that gains some."""
    return with_pages(deployment, measured_step_bytes(deployment)) if measures_step(deployment) else deployment


def measured_step_bytes(deployment: Deployment) -> int:
    """The memory of the largest step besides weights and state, as the compiler lays it out."""
    (weights, draft), measured = planned_weights(deployment), _with_few_pages(deployment)
    model, shapes, store = deployment.model, measured.shapes, program_store(measured)
    compiler = Compiler(model, weights, shapes, deployment.mesh, store, draft)
    keys: list[Key] = [StepShape(shapes.ladder.max_tokens), ("any", shapes.ladder.sample_sizes[-1])]
    with ThreadPoolExecutor(min(len(keys), deployment.resolved.compile_threads)) as pool:
        layouts = [program.memory_analysis() for program in pool.map(compiler.make, keys)]
    return sum(int(layout.temp_size_in_bytes) for layout in layouts) + shapes.num_samples * model.hidden_size * 4


def first_store(deployment: Deployment) -> ProgramStore:
    """The programs that are made first: those whose memory is measured, or else those of the deployment."""
    return program_store(_with_few_pages(deployment) if measures_step(deployment) else deployment)


def _with_few_pages(deployment: Deployment) -> Deployment:
    return replace(deployment, shapes=deployment.shapes.with_pages(MEASURED_PAGES))
