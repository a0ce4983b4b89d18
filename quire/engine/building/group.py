"""Builds the engine of a group: the leader and the others meet as processes of JAX, and load the same model."""

import logging
import socket
from collections.abc import Callable
from dataclasses import replace

import jax

from quire.engine.building.build import build_follower
from quire.engine.building.fingerprint import program_facts
from quire.engine.building.plan import Meet, plan_deployment
from quire.errors import InvalidSetting, QuireError
from quire.executor.memory import device_memory_bytes
from quire.executor.programs.replay import Follower
from quire.files.cache_folder import cache_folder
from quire.files.model_files import ModelFiles
from quire.files.progress import Progress, silent
from quire.group.arrays import from_message
from quire.group.facts import difference
from quire.group.leader import Leader
from quire.group.membership import Membership, join
from quire.group.messages import Deploy, Devices, Made, MemberFailed, Prepare, Reset, RunProgram
from quire.ops.native import library
from quire.settings.config import Config
from quire.settings.group import GroupSettings, shared_settings

log = logging.getLogger(__name__)

# JAX ends a process this long after it has lost another; the link finds out much earlier.
JAX_HEARTBEAT_S = 100
MEETING_S = 300


def lead(leader: Leader, settings: GroupSettings) -> Meet:
    """`Meet` of the leader: returns once all members know their devices."""

    def meet(files: ModelFiles, config: Config) -> Config:
        leader.gather(program_facts(files))
        coordinator = _free_address(settings.endpoint[0])
        leader.begin(coordinator)
        _meet_as_processes(coordinator, settings.group_size, 0)
        own = _devices(config)
        for rank, devices in enumerate(leader.devices(), start=1):
            if (unlike := difference(own.facts, devices.facts)) is not None:
                raise InvalidSetting(f"the devices of a group must be alike: member {rank}: {unlike}")
        count = len(jax.devices())
        if config.tensor_parallel not in (1, count):
            raise InvalidSetting(
                f"tensor_parallel is {config.tensor_parallel}; the {settings.group_size} members of the group have "
                f"{count} devices, and a group uses all of them: leave it out"
            )
        each = ", ".join(str(devices.num_devices) for devices in (own, *leader.devices()))
        log.info("the model is cut across %d devices of %d members (%s)", count, settings.group_size, each)
        if jax.default_backend() == "cpu" and config.quantize in (None, "auto") and config.dtype is None:
            log.info(
                "on CPUs a group computes in float32: its steps are several times as slow as those of one process in "
                "int8, and its tokens differ from them"
            )
        return replace(config, tensor_parallel=count)

    return meet


def follow(
    config: Config,
    settings: GroupSettings,
    lost: Callable[[str], None],
    joined: Callable[[], None] = lambda: None,
    progress: Progress = silent,
) -> None:
    """Join a group, and do what its leader announces. Never returns; `lost` is called when the leader is lost.

    `joined` is called when the group is complete. Raises a QuireError, or RefusedByLeader, where the group cannot work.
    """
    meeting: list[tuple[Membership, Deploy]] = []

    def meet(files: ModelFiles, config: Config) -> Config:
        membership, begin = join(settings, program_facts(files), lost)
        joined()
        _meet_as_processes(begin.coordinator, begin.size, settings.group_rank)
        membership.send(_devices(config))
        deploy = membership.next(Deploy)
        meeting.append((membership, deploy))
        unknown = [name for name in deploy.settings if name not in shared_settings(config, ())]
        if unknown:
            raise InvalidSetting(f"the leader decided {', '.join(unknown)}, which this version does not have")
        return replace(config, **deploy.settings)

    try:
        deployment = plan_deployment(config, progress, meet=meet)
        membership, deploy = meeting[0]
        if str(deployment.shapes) != deploy.sizes:
            sizes = f"here {deployment.shapes}, at the leader {deploy.sizes}"
            raise InvalidSetting(f"the sizes of this member are others than the leader's: {sizes}")
        follower = build_follower(deployment, progress)
    except QuireError as error:
        if meeting:
            meeting[0][0].send(MemberFailed(error.message, is_permanent=True))
        raise
    log.info("member %d of %d follows its leader", settings.group_rank, settings.group_size)
    try:
        while True:
            _obey(follower, membership)
    except Exception as error:
        membership.send(MemberFailed(repr(error)))
        raise


def _obey(follower: Follower, membership: Membership) -> None:
    message = membership.next(RunProgram, Prepare, Reset)
    if isinstance(message, RunProgram):
        follower.run(message.key, [from_message(array) for array in message.arrays], message.hidden)
    elif isinstance(message, Prepare):
        key = message.key
        follower.prepare(key, lambda reason: membership.send(Made(key, reason)))
    else:
        follower.reset()


def _meet_as_processes(coordinator: str, size: int, rank: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(
        coordinator,
        size,
        rank,
        initialization_timeout=MEETING_S,
        coordinator_bind_address=coordinator,
        heartbeat_timeout_seconds=JAX_HEARTBEAT_S,
        cluster_detection_method="deactivate",
    )


def _free_address(host: str) -> str:
    """An address of the leader that no earlier group has used: processes of JAX cannot meet again where one died."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _devices(config: Config) -> Devices:
    local = jax.local_devices()
    facts = {"platform": jax.default_backend(), "device": local[0].device_kind}
    if jax.default_backend() == "cpu":
        facts["native library"] = str(library.load(cache_folder(config.cache_dir) / "native"))
    return Devices(len(local), device_memory_bytes(local[0]), facts)
