"""Settings of a group: several processes that are one engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.errors import InvalidSetting, shown
from quire.files.regular_file import read_regular
from quire.settings.choice import Choice
from quire.settings.config import Config, setting

GROUP = "Group"
MAX_SIZE = 1024
MEMBER_LOST = 71  # exit status of an engine after its group has lost a member
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096


@dataclass(frozen=True)
class GroupSettings:
    """Settings of one member. A group of one is none."""

    group_size: int = setting(
        1,
        GROUP,
        "Processes that are one engine, on one host or several: the model is split across all their devices. Not with "
        "--data-parallel, adapters or --draft-model.",
    )
    group_rank: int = setting(0, GROUP, "Number of this process in its group. 0 is the leader, which serves HTTP.")
    group_address: str | None = setting(
        None, GROUP, "HOST:PORT of the leader: it listens there, and the others connect to it."
    )
    group_secret_file: Path | None = setting(
        None, GROUP, "File with the secret that all members share. The variable QUIRE_GROUP_SECRET can have it instead."
    )
    # Command lines are visible to every user of a machine, so only the variable is documented.
    group_secret: str | None = field(
        default=None,
        repr=False,
        metadata={"group": GROUP, "help": "The secret.", "hidden": True, "variable": "QUIRE_GROUP_SECRET"},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.group_size <= MAX_SIZE:
            raise InvalidSetting(f"group_size is {self.group_size}; it must be between 1 and {MAX_SIZE}")
        if not 0 <= self.group_rank < self.group_size:
            raise InvalidSetting(
                f"group_rank is {self.group_rank}; with group_size = {self.group_size} it must be between 0 and "
                f"{self.group_size - 1}"
            )
        if self.group_size == 1:
            return
        if self.group_address is None:
            raise InvalidSetting("group_size needs group_address, the leader's HOST:PORT")
        _ = self.endpoint
        if self.group_secret_file is None and self.group_secret is None:
            raise InvalidSetting(
                "a group needs a secret that its members share: group_secret_file, or the variable QUIRE_GROUP_SECRET"
            )

    @property
    def is_group(self) -> bool:
        return self.group_size > 1

    @property
    def is_leader(self) -> bool:
        return self.group_rank == 0

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the leader."""
        return endpoint_of("group_address", self.group_address or "")

    def secret(self) -> bytes:
        """The secret that the members share; the file's, where both are given."""
        return read_secret("group_secret_file", self.group_secret_file, "QUIRE_GROUP_SECRET", self.group_secret)


def shared_settings(config: Config, choices: Iterable[Choice[Any]]) -> dict[str, Any]:
    """The values, as they were decided, of the settings that the leader decides for all members."""
    decided = {choice.name: choice.value for choice in choices}
    shared = [each.name for each in fields(Config) if each.metadata["of_group"]]
    return {name: decided.get(name, getattr(config, name)) for name in shared}


def endpoint_of(setting: str, given: str) -> tuple[str, int]:
    """Host and port of an address that a setting has."""
    host, colon, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= 65535:
        raise InvalidSetting(f"{setting} is {shown(given)}; it must be HOST:PORT, as in 10.0.0.1:7000")
    return host, int(port)


def read_secret(setting: str, file: Path | None, variable: str, value: str | None) -> bytes:
    """A shared secret: that in the file, else that of the variable."""
    source, secret = variable, (value or "").encode()
    if file is not None:
        source = str(file)
        try:
            secret = read_regular(file)
        except OSError as error:
            raise InvalidSetting(f"{setting}: {source} cannot be read: {error.strerror}") from error
    secret = secret.strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise InvalidSetting(
            f"the shared secret ({source}) has {len(secret)} bytes; it must have between {MIN_SECRET_BYTES} and "
            f"{MAX_SECRET_BYTES}"
        )
    return secret
