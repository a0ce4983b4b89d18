"""The folder of an engine: pages that are read from it before requests begin, and written to it when they end."""

import logging
from concurrent.futures import Future
from typing import Any

from quire.engine.pages.folder_saves import FolderSaves
from quire.engine.pages.folder_source import FolderSource
from quire.engine.pages.traffic import DigestOf, PageTraffic, Store
from quire.engine.port import Port, Ports
from quire.page_folder.page_folder import PageFolder
from quire.peers.bundle import PageForm
from quire.request import Request

log = logging.getLogger(__name__)


class FolderTraffic:
    """Both directions. Owned by the engine thread."""

    def __init__(
        self,
        folder: PageFolder,
        source: FolderSource,
        saves: FolderSaves,
        store: Store,
        form: PageForm,
        digest_of: DigestOf,
    ) -> None:
        self._folder = folder
        self._source = source
        self._saves = saves
        self._store = store
        self._reads = PageTraffic(source, store, form, digest_of)
        self._digest_of = digest_of
        self._live: dict[int, Request] = {}

    def start(self, ports: Ports) -> None:
        """The engine runs."""
        self._saves.start(Port(ports.post, 0, lambda events: None).run)

    def prepare(self, request: Request) -> "Future[Any] | None":
        self._live[request.request_id] = request
        return self._reads.prepare(request)

    def forget(self, request_id: int, is_finished: bool = False) -> None:
        self._reads.forget(request_id)
        request = self._live.pop(request_id, None)
        if request is None or not is_finished:
            return
        try:
            digest = self._digest_of(request.adapter)
            # Its adapter may have lost its name since, and is then not here any more.
            if digest is not None and request.adapter_digest in ("", digest):
                self._saves.offer(request, digest, self._store.names(request, digest))
        except Exception:  # of ours; the answer is complete, its pages are not kept
            log.exception("the pages of a prompt cannot be kept")

    def counted(self) -> dict[str, int]:
        saves = self._saves.counted()  # before the folder's numbers, which then have all pages of these saves
        unused = {"reads_unused": self._reads.num_unused}
        return self._folder.counted() | self._source.counted() | unused | saves
