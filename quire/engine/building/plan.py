"""Plans a deployment: from the files of a model and the settings, before any weight is read."""

from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import Mesh

from quire.engine.building.adapter_plan import plan_adapters
from quire.engine.building.deployment import Deployment
from quire.engine.building.draft_plan import DraftPlan, check_draft, find_draft
from quire.engine.building.facts import facts_of
from quire.engine.building.page_count import estimated_step_bytes, with_pages
from quire.engine.building.sizes import limits_of, shapes_of
from quire.errors import InvalidSetting
from quire.executor.layer_state import PageLayout, page_layout
from quire.executor.memory import reserve_device_memory
from quire.files.model_files import ModelFiles, locate
from quire.files.progress import Progress, silent
from quire.layer_kind import EXPERTS, LayerKind
from quire.models.checkpoint import leaves, stored_names
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model
from quire.models.stored_head import with_stored_head
from quire.ops.sharding import tensor_mesh
from quire.settings.config import Config
from quire.settings.machine import limit_threads, memory_bytes
from quire.settings.refusals import Case, ModelTraits, refuse, settings_of
from quire.settings.resolve import Facts, Resolved, resolve
from quire.text.tokenizer import load_tokenizer

# Called once the model's files are known and before JAX has looked for devices.
Meet = Callable[[ModelFiles, Config], Config]


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
    refuse(Case(settings_of(config)))
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
    facts = facts_of(config, model, mesh, draft, source, memory_bytes() // num_engines)
    resolved = resolve(config, facts, is_served)
    layout = layout_of(model, resolved, mesh)
    refuse(refusal_case(config, facts, resolved, traits_of(files.name, model, layout), draft))
    if draft is not None:
        check_draft(draft, resolved.max_total_tokens)
    adapters = plan_adapters(config, model, resolved, mesh)
    facts = replace(facts, weight_bytes=facts.weight_bytes + adapters.num_bytes)
    limits = replace(limits_of(config, resolved, layout), max_loras=adapters.sizes.slots)
    deployment = Deployment(
        config=config,
        files=files,
        source=source,
        model=model,
        mesh=mesh,
        facts=facts,
        resolved=resolved,
        layout=layout,
        shapes=replace(shapes_of(model, mesh, facts, resolved, layout, limits), adapters=adapters.sizes),
        limits=limits,
        adapters=adapters,
        is_served=is_served,
        choices=(*resolved.choices, *adapters.choices),
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


def layout_of(model: Decoder, resolved: Resolved, mesh: Mesh | None) -> PageLayout:
    """The page groups of a model, and the types of its states."""
    sizes = resolved.page_size, resolved.max_total_tokens, resolved.dtype
    return page_layout(model.layers, *sizes, mesh, page_dtype=resolved.page_dtype)


def layer_kinds(model: Decoder) -> tuple[LayerKind, ...]:
    """The kinds of layers that a model has, each once."""
    has_experts = any(param.is_of_experts for param in leaves(model.params()))
    return (*dict.fromkeys(spec.kind for spec in model.layers), *((EXPERTS,) if has_experts else ()))


def traits_of(name: str, model: Decoder, layout: PageLayout) -> ModelTraits:
    return ModelTraits(name, layer_kinds(model), None if None in layout.groups else layout.rules)


def refusal_case(
    config: Config, facts: Facts, resolved: Resolved, model: ModelTraits, draft: DraftPlan | None = None
) -> Case:
    """Everything that settings are refused for, once they are decided."""
    return Case(
        settings=settings_of(config) | {"dtype": resolved.dtype, "kv_cache_dtype": resolved.kv_cache_dtype},
        origins={choice.name: choice.reason for choice in resolved.choices if choice.is_automatic},
        platform=facts.platform,
        is_native=facts.is_native,
        model=model,
        draft=None if draft is None else ModelTraits(draft.files.name, layer_kinds(draft.model)),
    )
