"""The places outside an engine that pages come from and go to."""

import logging
from concurrent.futures import Future
from typing import Any

from quire.engine.pages.folder_traffic import FolderTraffic
from quire.engine.pages.prefills import Prefills
from quire.engine.pages.traffic import DigestOf, PageTraffic, Store
from quire.engine.port import Ports
from quire.peers.prefill_server import PrefillServer
from quire.request import Request

log = logging.getLogger(__name__)


class PageSources:
    """A folder with pages, and other engines, in both directions: pages that peers compute for this engine, and those
    that it computes for them. An engine may have none of them. Owned by the engine thread."""

    def __init__(self) -> None:
        self._folder: FolderTraffic | None = None
        self._peers: PageTraffic | None = None
        self._server: PrefillServer | None = None
        self._reached: dict[int, int] = {}  # by request that waits, the source that it waits for

    def keep(self, folder: FolderTraffic) -> None:
        """Keep pages in a folder, and look for them there before peers are asked."""
        self._folder = folder

    def ask(self, traffic: PageTraffic) -> None:
        """Let peers compute the long prompts of this engine."""
        self._peers = traffic

    def answer(self, server: PrefillServer, store: Store, digest_of: DigestOf) -> None:
        """Compute prompts of peers, from `start` on."""
        self._server, self._store, self._digest_of = server, store, digest_of

    def start(self, ports: Ports) -> None:
        """The engine runs."""
        if self._folder is not None:
            self._folder.start(ports)
        if self._server is not None:
            self._server.start(Prefills(ports, self._store, self._digest_of).begin)

    def prepare(self, request: Request) -> "Future[Any] | None":
        """The arrival of pages that the request should wait for. It is called again then, until there are none. Those
        of a source that fails are computed."""
        sources = (self._folder, self._peers)
        for place in range(self._reached.pop(request.request_id, 0), len(sources)):
            source = sources[place]
            if source is None:
                continue
            try:
                arriving = source.prepare(request)
            except Exception:  # of ours, or no thread can be started; the request is computed
                log.exception("the pages of a prompt cannot be fetched")
                source.forget(request.request_id)
                continue
            if arriving is not None:
                self._reached[request.request_id] = place
                return arriving
        return None

    def forget(self, request_id: int, is_finished: bool = False) -> None:
        """The request has ended. Where it `is_finished` what it computed is in the cache."""
        self._reached.pop(request_id, None)
        if self._folder is not None:
            self._folder.forget(request_id, is_finished)
        if self._peers is not None:
            self._peers.forget(request_id)

    def counters(self) -> dict[str, int]:
        """Numbers since the start. Any thread may read them."""
        folder = {} if self._folder is None else self._folder.counted()
        peers: dict[str, int] = {}
        if self._peers is not None:
            peers = self._peers.counted()
            peers["pulls_received"] -= self._peers.num_unused
            peers["pulls_unused"] = self._peers.num_unused
        if self._server is not None:
            peers |= self._server.counted()
        counted = {f"peer_{name}": count for name, count in peers.items()}
        return counted | {f"folder_{name}": count for name, count in folder.items()}
