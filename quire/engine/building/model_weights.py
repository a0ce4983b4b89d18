"""Loads the weights of a deployment: those of the model, and those of its draft."""

import json
import logging
from typing import Any

from quire.engine.building.deployment import Deployment
from quire.executor.draft.draft import Draft
from quire.executor.memory import weight_sizes
from quire.executor.programs.store import sources_digest
from quire.files.cache_folder import cache_folder
from quire.files.progress import Progress
from quire.models.adapters import make_room
from quire.models.checkpoint import Placement, leaves, load_weights, stored_names, stored_params
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.params import ParamTree
from quire.models.random_weights import random_weights
from quire.models.weight_store import WEIGHTS_FOLDER, WeightStore
from quire.ops.native.processor import instruction_set
from quire.ops.sharding import sharding
from quire.settings.memory import as_size

log = logging.getLogger(__name__)


def placement_of(deployment: Deployment) -> Placement | None:
    """The sharding of each weight; None on one device."""
    mesh = deployment.mesh
    return None if mesh is None else lambda param: sharding(param.shape, param.axes, mesh)


def _loading(deployment: Deployment, progress: Progress) -> dict[str, Any]:
    """The arguments with which the weights of the model and of its draft are loaded."""
    resolved = deployment.resolved
    placement = placement_of(deployment)
    return {"dtype": resolved.dtype, "quantize": resolved.quantize, "placement": placement, "progress": progress}


def load_draft(deployment: Deployment, progress: Progress) -> Draft | None:
    draft, seed = deployment.draft, deployment.config.random_seed
    return None if draft is None else Draft(draft.model, draft.load(seed, **_loading(deployment, progress)))


def describe_experts(deployment: Deployment) -> dict[str, str]:
    """The experts of a model and the type that they have, for the log and `quire doctor`; empty if it has none."""
    params = [param for param in leaves(deployment.model.params()) if param.is_of_experts]
    if not params:
        return {}
    model, source, resolved = deployment.model, deployment.source, deployment.resolved
    quantized = source if isinstance(source, QuantizedSource) else None
    quantize: Any = resolved.quantize
    kind = resolved.dtype if resolved.quantize == "none" else resolved.quantize
    if quantize == "none" and quantized is not None:
        stored = stored_names(model, quantized)
        first = next(param for param in leaves(stored_params(model, quantized)) if param.is_of_experts)
        if quantized.layout(stored[first.sources[0].name]) is not None:
            kind = f"the checkpoint's type: {quantized.quantization.summary}"
    num_bytes = weight_sizes(model, quantized, resolved.dtype, quantize, deployment.mesh).expert_bytes
    layers = len(params) // 2  # gates with ups, and downs
    count = f"{params[0].shape[0]} in each of {layers} layers" if layers > 1 else f"{params[0].shape[0]} in one layer"
    return {"experts": f"{count}, {as_size(num_bytes)} on each device, in {kind}"}


def load_model(deployment: Deployment, progress: Progress) -> ParamTree:
    weights = _load_model(deployment, progress)
    make_room_for_adapters(weights, deployment)
    return weights


def make_room_for_adapters(weights: ParamTree, deployment: Deployment) -> None:
    """On a GPU an adapter's two small products are as many launches: with rows below the weight's one is left. On a
    CPU they cost what they compute, for the rows that have adapters alone."""
    if deployment.facts.platform == "gpu" and deployment.mesh is None and deployment.shapes.adapters.slots:
        make_room(weights, deployment.model, deployment.shapes.adapters)


def _load_model(deployment: Deployment, progress: Progress) -> ParamTree:
    arguments = _loading(deployment, progress)
    for name, words in describe_experts(deployment).items():
        log.info("%s: %s", name, words)
    if deployment.source is None:
        return random_weights(deployment.model, seed=deployment.config.random_seed, **arguments)
    model, source = deployment.model, deployment.source
    if deployment.resolved.quantize != "int8" or deployment.mesh is not None or not deployment.facts.fast_int8:
        return load_weights(model, source, **arguments)
    quantization = str(source.quantization) if isinstance(source, QuantizedSource) else ""
    config = json.dumps(deployment.files.config, sort_keys=True, default=str)  # it says how tensors are joined
    code = sources_digest("files")  # with what reads them
    identity = (code, instruction_set(), deployment.resolved.dtype, quantization, config)
    store = WeightStore(cache_folder(deployment.config.cache_dir) / WEIGHTS_FOLDER, source.files, identity)
    return store.load(model, lambda: load_weights(model, source, **arguments))
