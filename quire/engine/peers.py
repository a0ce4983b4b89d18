"""The other engines that an engine exchanges pages with."""

from concurrent.futures import Future
from typing import Any

from quire.engine.page_traffic import PageTraffic, Store
from quire.engine.prefills import DigestOf, Ports, Prefills
from quire.peers.prefill_server import PrefillServer
from quire.request import Request


class Peers:
    """Both directions: pages that peers compute for this engine, and those that it computes for them. An engine without
    a role has neither. Owned by the engine thread."""

    def __init__(self) -> None:
        self._traffic: PageTraffic | None = None
        self._server: PrefillServer | None = None

    def ask(self, traffic: PageTraffic) -> None:
        """Let peers compute the long prompts of this engine."""
        self._traffic = traffic

    def answer(self, server: PrefillServer, store: Store, digest_of: DigestOf) -> None:
        """Compute prompts of peers, from `start` on."""
        self._server, self._store, self._digest_of = server, store, digest_of

    def start(self, ports: Ports) -> None:
        """The engine runs."""
        if self._server is not None:
            self._server.start(Prefills(ports, self._store, self._digest_of).begin)

    def prepare(self, request: Request) -> "Future[Any] | None":
        """The arrival of pages that the request should wait for. It is called again then, until there are none."""
        return None if self._traffic is None else self._traffic.prepare(request)

    def forget(self, request_id: int) -> None:
        if self._traffic is not None:
            self._traffic.forget(request_id)

    def counters(self) -> dict[str, int]:
        """Numbers since the start. Any thread may read them."""
        found = {} if self._traffic is None else self._traffic.counters()
        if self._server is not None:
            found |= self._server.counted()
        return {f"peer_{name}": count for name, count in found.items()}
