"""`quire doctor`: the machine, the model, and how the model fits."""

import os
import platform
from dataclasses import replace
from typing import Annotated, Any

import typer

from quire import __version__
from quire.cli.console import log_to_stderr
from quire.cli.settings import with_settings
from quire.files.cache_folder import cache_folder
from quire.settings import machine
from quire.settings.choice import Choice
from quire.settings.config import Config
from quire.settings.dtypes import SEVERAL_DEVICES
from quire.settings.group import GroupSettings
from quire.settings.host_cache import with_host_cache
from quire.settings.memory import as_size
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings
from quire.settings.refusals import Case, refuse, refused_for, settings_of


@with_settings
def doctor(
    config: Config,
    folder: FolderSettings,
    group: GroupSettings,
    peers: PeerSettings,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machine, how the model would fit and every choice of settings, without loading the weights."""
    log_to_stderr(quiet=True)
    from quire.executor.memory import reserve_device_memory

    refuse(Case(settings_of(config, folder, group, peers)))
    reserve_device_memory(config.host_cache_gib, config.memory_fraction)  # before anything looks for devices
    machine = _machine() | _group(group) | role_of(peers)
    if not json:
        _print("This machine", machine)
    from quire.engine.building.compiling import describe_programs
    from quire.engine.building.deployment import cache_capacity
    from quire.engine.building.model_weights import describe_experts
    from quire.engine.building.plan import plan_deployment, traits_of
    from quire.files.progress import progress_bar, silent

    config = with_host_cache(config, peers, folder)
    deployment = plan_deployment(_as_in_group(config, group), silent if json else progress_bar, is_served=True)
    facts, limits, resolved = deployment.facts, deployment.limits, deployment.resolved
    page_bytes = deployment.page_bytes
    weight_type = resolved.dtype if resolved.quantize == "none" else f"{resolved.quantize} and {resolved.dtype}"
    if resolved.quantize == "none" and facts.quantization is not None:
        weight_type = f"{resolved.dtype} and as the checkpoint is: {facts.quantization}"
    model = {
        "name": deployment.files.name,
        "architecture": deployment.files.config.get("model_type", "?"),
        "layers": deployment.model.num_layers,
        "vocabulary": deployment.model.vocab_size,
        "positions": deployment.model.max_positions,
        "weights": f"{as_size(facts.weight_bytes)} on each device, in {weight_type}",
        **describe_experts(deployment),
        "chat template and tokenizer": "yes" if deployment.files.tokenizer is not None else "none: token ids only",
    }
    traits = traits_of(deployment.files.name, deployment.model, deployment.layout)
    refused = [name for name in refused_for(traits, facts.platform) if name != "snapshots"]
    if refused:
        model["refused settings"] = ", ".join(refused)
    if deployment.draft is not None:
        draft = deployment.draft
        model["draft"] = f"{draft.files.name}, {draft.model.num_layers} layers; in the weights and pages below"
    fit = {
        "memory allowed": f"{as_size(resolved.memory_limit_bytes)} of {as_size(facts.memory_bytes)}",
        "weights": as_size(facts.weight_bytes),
        **_widened(facts.widened_weight_bytes),
        "pages": f"{limits.num_pages} x {as_size(page_bytes)} = {as_size(limits.num_pages * page_bytes)}",
        **cache_capacity(deployment),
        **_folder(deployment, folder),
        "sequences at the same time": f"up to {limits.max_batch_size}",
        "programs": describe_programs(deployment),
        "kept packed weights": _kept_weights(config),
        **_native_library(facts.platform),
    }
    choices = deployment.choices
    if deployment.config.quantize != config.quantize:
        of_group = Choice("quantize", "none", f"a group: {SEVERAL_DEVICES}; one process computes in int8 where it can")
        choices = tuple(of_group if choice.name == of_group.name else choice for choice in choices)
    if json:
        import json as json_format

        shown = {choice.name: {"value": choice.value, "reason": choice.reason} for choice in choices}
        print(json_format.dumps({"machine": machine, "model": model, "fit": fit, "choices": shown}, indent=2))
        return
    _print("The model", model)
    _print("What fits", fit)
    _print("Choices", {choice.name: f"{choice.value} ({choice.reason})" for choice in choices})


def _folder(deployment: Any, settings: FolderSettings) -> dict[str, str]:
    if settings.cache_folder is None:
        return {}
    from quire.engine.building.folder import folder_contents

    settings.check()
    return {"cache folder": folder_contents(deployment, settings)}


def _widened(num_bytes: int) -> dict[str, Any]:
    """The float copy of a quantised weight that exists while it is multiplied."""
    return {"largest weight in float": f"{as_size(num_bytes)}, one at a time while it is used"} if num_bytes else {}


def _kept_weights(config: Config) -> str:
    from quire.models.weight_store import KEPT_FILES, WEIGHTS_FOLDER, kept_bytes

    folder = cache_folder(config.cache_dir) / WEIGHTS_FOLDER
    return f"{as_size(kept_bytes(folder))} in {folder}, of at most {KEPT_FILES} models"


def _native_library(platform: str) -> dict[str, str]:
    if platform != "cpu":
        return {}
    from quire.ops.native import library

    return {"native library": library.description()}


def _machine() -> dict[str, Any]:
    import jax

    from quire.executor.memory import device_memory_bytes
    from quire.ops.gpu.capability import this_gpu
    from quire.server.processes.engine_devices import visible_gpus

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    host = f"{platform.machine()}, {machine.num_visible_processors()} cores, {as_size(machine.physical_memory_bytes())}"
    limits = machine.container_limits()
    return {
        "versions": f"quire {__version__}, jax {jax.__version__}, python {platform.python_version()}",
        "host": host,
        **({} if limits is None else {"this container": limits}),
        "devices": f"{len(devices)} x {jax.default_backend()} ({', '.join(kinds)})",
        "memory of a device": as_size(device_memory_bytes(devices[0])),
        **({} if (gpu := this_gpu()) is None else {"GPU kernels": str(gpu)}),
        **unused_gpus(jax.default_backend(), visible_gpus(os.environ)),
    }


def unused_gpus(platform: str, gpus: tuple[str, ...]) -> dict[str, Any]:
    """NVIDIA GPUs that JAX cannot use because its plugin is missing; empty if there are none or JAX uses them."""
    if platform == "gpu" or not gpus:
        return {}
    return {"unused GPUs": f"{len(gpus)} NVIDIA; JAX cannot use them: pip install 'quire[cuda]', or make serve-gpu"}


def _as_in_group(config: Config, group: GroupSettings) -> Config:
    """With weights as the leader of a group has them, which has several devices where there is one to be looked at."""
    import jax

    is_chosen = config.quantize in (None, "auto") and config.dtype is None
    if group.is_group and is_chosen and jax.default_backend() == "cpu":
        return replace(config, quantize="none")
    return config


def _group(group: GroupSettings) -> dict[str, Any]:
    """This member's place in its group. Nothing is sent to the others; the fit is for the devices of this machine."""
    if not group.is_group:
        return {}
    group.secret()  # raises where there is none
    role = "the leader" if group.is_leader else "a follower"
    return {
        "group": f"{group.group_size} members at {group.group_address}; this is member {group.group_rank}, {role}",
        "devices of the group": "those of all members; the rest of this report is for this machine's devices only",
    }


def role_of(peers: PeerSettings) -> dict[str, Any]:
    """The role of this server. Nothing is sent to its peers."""
    if peers.role is None:
        return {}
    peers.secret()  # raises where there is none
    parts = []
    if peers.answers:
        parts.append(f"computes prompts for servers that connect to {peers.peer_address}")
    if peers.asks:
        others = ", ".join(f"{host}:{port}" for host, port in peers.endpoints)
        parts.append(
            f"lets {others} compute prompts with more than {peers.peer_min_tokens} tokens that are not cached, for at "
            f"most {peers.peer_timeout_s:g} s each"
        )
    return {"role": f"{peers.role}: {'; '.join(parts)}"}


def _print(title: str, entries: dict[str, Any]) -> None:
    print(title)
    width = max(map(len, entries))
    for name, value in entries.items():
        print(f"  {name:<{width}}  {value}")
    print(flush=True)
