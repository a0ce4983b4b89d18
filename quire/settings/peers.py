"""Settings of servers that exchange pages."""

from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import InvalidSetting, shown
from quire.settings.config import setting
from quire.settings.group import endpoint_of, read_secret

PEERS = "Peers"
ROLES = ("prefill", "decode", "both")
MAX_PEERS = 256


@dataclass(frozen=True)
class PeerSettings:
    """Settings of one server. Without a role it exchanges nothing."""

    role: str | None = setting(
        None,
        PEERS,
        "prefill: compute prompts for other servers. decode: let others compute the long prompts of this one. both. "
        "Not with --group-size; prefill and both not with --data-parallel.",
    )
    peers: tuple[str, ...] = setting(
        (), PEERS, "HOST:PORT of each prefill server, for decode and both; comma-separated, or repeat the option."
    )
    peer_address: str | None = setting(None, PEERS, "HOST:PORT to listen on for decode servers, for prefill and both.")
    peer_secret_file: Path | None = setting(
        None, PEERS, "File with the secret that all peers share. The variable QUIRE_PEER_SECRET can have it instead."
    )
    # Command lines are visible to every user of a machine, so only the variable is documented.
    peer_secret: str | None = field(
        default=None,
        repr=False,
        metadata={"group": PEERS, "help": "The secret.", "hidden": True, "variable": "QUIRE_PEER_SECRET"},
    )
    peer_min_tokens: int = setting(
        256, PEERS, "Prompts with fewer tokens that are not cached are computed here, without asking a peer."
    )
    peer_timeout_s: float = setting(
        10.0, PEERS, "Seconds that a peer has to compute a prompt and send its pages; then it is computed here."
    )

    def __post_init__(self) -> None:
        if self.peer_min_tokens < 1:
            raise InvalidSetting(f"peer_min_tokens is {self.peer_min_tokens}; it must be at least 1")
        if not 0 < self.peer_timeout_s < float("inf"):
            raise InvalidSetting(f"peer_timeout_s is {self.peer_timeout_s}; it must be above 0")
        if self.role is None:
            for name in ("peers", "peer_address", "peer_secret_file"):
                if getattr(self, name):
                    raise InvalidSetting(f"{name} needs role, which can be {', '.join(ROLES)}")
            return
        if self.role not in ROLES:
            raise InvalidSetting(f"role is {shown(self.role)}; it can be {', '.join(ROLES)}")
        if self.asks != bool(self.peers):
            wanted = "needs peers, HOST:PORT of each prefill server" if self.asks else "asks no peers; leave them out"
            raise InvalidSetting(f"role = {self.role} {wanted}")
        if self.answers != (self.peer_address is not None):
            wanted = (
                "needs peer_address, HOST:PORT to listen on" if self.answers else "has no peer_address; leave it out"
            )
            raise InvalidSetting(f"role = {self.role} {wanted}")
        _ = self.listens_at
        if len(self.endpoints) > MAX_PEERS:
            raise InvalidSetting(f"peers has {len(self.endpoints)} addresses; the limit is {MAX_PEERS}")
        if self.peer_secret_file is None and self.peer_secret is None:
            raise InvalidSetting(
                "peers need a secret that they share: peer_secret_file, or the variable QUIRE_PEER_SECRET"
            )

    @property
    def asks(self) -> bool:
        """Other servers compute prompts of this one."""
        return self.role in ("decode", "both")

    @property
    def answers(self) -> bool:
        """It computes prompts of other servers."""
        return self.role in ("prefill", "both")

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each prefill server."""
        given = [part.strip() for parts in self.peers for part in parts.split(",")]
        return tuple(dict.fromkeys(endpoint_of("peers", address) for address in given))

    @property
    def listens_at(self) -> tuple[str, int] | None:
        """Host and port for decode servers."""
        return None if self.peer_address is None else endpoint_of("peer_address", self.peer_address)

    def secret(self) -> bytes:
        """The secret that the peers share; the file's, where both are given."""
        return read_secret("peer_secret_file", self.peer_secret_file, "QUIRE_PEER_SECRET", self.peer_secret)
