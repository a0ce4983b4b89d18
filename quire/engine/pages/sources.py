"""The places outside an engine that pages come from and go to."""

import logging
from concurrent.futures import Future
from typing import Any

from quire.engine.pages.folder_saves import FolderSaves
from quire.engine.pages.peers import Prefills
from quire.engine.pages.store import DigestOf, PageStore
from quire.engine.pages.traffic import PageTraffic
from quire.engine.port import Port, Ports
from quire.peers.prefill_server import PrefillServer
from quire.request import Request

log = logging.getLogger(__name__)


class PageSources:
    """A folder with pages, and other engines, in both directions: pages that peers compute for this engine, and those
    that it computes for them. An engine may have none of them. Owned by the engine thread."""

    def __init__(self) -> None:
        self._folder: PageTraffic | None = None
        self._saves: FolderSaves | None = None
        self._peers: PageTraffic | None = None
        self._server: PrefillServer | None = None
        self._reached: dict[int, int] = {}  # by request that waits, the source that it waits for

    def keep(self, reads: PageTraffic, saves: FolderSaves) -> None:
        """Keep pages in a folder, and look for them there before peers are asked."""
        self._folder, self._saves = reads, saves

    def ask(self, traffic: PageTraffic) -> None:
        """Let peers compute the long prompts of this engine."""
        self._peers = traffic

    def answer(self, server: PrefillServer, store: PageStore, digest_of: DigestOf) -> None:
        """Compute prompts of peers, from `start` on."""
        self._server, self._store, self._digest_of = server, store, digest_of

    def start(self, ports: Ports) -> None:
        """The engine runs."""
        if self._saves is not None:
            self._saves.start(Port(ports.post, 0, lambda events: None).run)
        if self._server is not None:
            self._server.start(Prefills(ports, self._store, self._digest_of).begin)

    def prepare(self, request: Request) -> "Future[Any] | None":
        """The arrival of pages that the request should wait for. It is called again then, until there are none. Those
        of a source that fails are computed."""
        if self._saves is not None:
            self._saves.note(request)
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
        for source in (self._folder, self._peers):
            if source is not None:
                source.forget(request_id)
        if self._saves is not None:
            self._saves.forget(request_id, is_finished)

    def counters(self) -> dict[str, int]:
        """Numbers since the start. Any thread may read them."""
        saves = {} if self._saves is None else self._saves.counted()  # first: the folder has all pages of these saves
        folder = {} if self._folder is None else self._folder.counted()
        peers = {} if self._peers is None else self._peers.counted()
        server = {} if self._server is None else self._server.counted()
        by_place = {"peer": peers | server, "folder": folder | saves}
        return {f"{place}_{name}": count for place, counted in by_place.items() for name, count in counted.items()}
