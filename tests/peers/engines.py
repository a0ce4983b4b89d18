"""Engines with fake executors that exchange pages over real connections."""

import time

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.pages.folder_saves import FolderSaves
from quire.engine.pages.folder_source import FolderSource
from quire.engine.pages.peers import PeerSource
from quire.engine.pages.store import PageStore
from quire.engine.pages.traffic import PageTraffic
from quire.page_folder.page_file import ArrayForm, PageFiles
from quire.page_folder.page_folder import PageFolder
from quire.peers.bundle import PageForm
from quire.peers.page_client import PageClient
from quire.peers.prefill_server import PrefillServer
from tests.core.harness import limits
from tests.engine.test_driver import Client
from tests.fake_executor import FakeExecutor
from tests.fake_host_pages import PLACE_BYTES
from tests.patience import WAIT_S
from tests.peers.exchange import FACTS, SECRET

PAGE_SIZE = 4
KEY = "0123456789abcdef" * 2
ARRAYS = (ArrayForm(("places",), "int64", (1, PAGE_SIZE, PLACE_BYTES // 8)),)


def folder_of(root, max_bytes: int = 2**30, key: str = KEY, kind=PageFolder) -> PageFolder:
    return kind(root, PageFiles(key, PAGE_SIZE, PAGE_SIZE * PLACE_BYTES, ARRAYS), max_bytes)


class PeerEngine:
    """A running engine: one that answers listens, one that asks has the endpoints of others."""

    def __init__(
        self,
        *endpoints,
        answers=False,
        adapters=(),
        timeout_s=WAIT_S,
        before_result=None,
        folder=None,
        compute_s=lambda num_tokens, num_cached: None,
        **changes,
    ) -> None:
        """`folder`: a folder of files for its pages, as `folder_of` makes it. `compute_s`: the time to compute tokens
        of a prompt."""
        chosen = limits(
            **(
                {"num_pages": 100, "max_batch_size": 8, "max_sequence_tokens": 200, "host_pages": 120, "max_loras": 2}
                | changes
            )
        )
        self.executor = FakeExecutor(
            chosen.num_pages,
            PAGE_SIZE,
            chosen.max_batch_size,
            before_result=before_result,
            page_groups=chosen.page_groups,
            num_host_pages=chosen.host_pages,
        )
        self.engine = Engine(Scheduler(chosen, time.monotonic), self.executor, read_adapter=int)
        for name, weights in dict(adapters).items():
            self.engine.adapters.load(name, weights)
        form = PageForm(PAGE_SIZE, PAGE_SIZE * PLACE_BYTES, chosen.page_groups)
        self.store = store = PageStore(self.engine.scheduler, lambda: self.engine.executor, form)
        digest_of = self.engine.adapters.digest_of
        self.server = self.client = None
        if answers:
            self.server = PrefillServer(("127.0.0.1", 0), SECRET, FACTS, form)
            self.engine.page_sources.answer(self.server, store, digest_of)
        if endpoints:
            self.client = PageClient(endpoints, SECRET, FACTS, form)
            source = PeerSource(self.client, store, form, 8, timeout_s)
            self.engine.page_sources.ask(PageTraffic(source, store, form, digest_of))
        if folder is not None:
            folder.scan()
            self.source = FolderSource(folder, store, form, compute_s, timeout_s)
            saves = FolderSaves(folder, store, form.page_bytes, digest_of, max_bytes_per_s=2**40)
            self.engine.page_sources.keep(PageTraffic(self.source, store, form, digest_of), saves)
        self.driver = Driver(self.engine)
        self.driver.start()
        self.engine.page_sources.start(self.driver)
        self.front_end = Client(self.driver)
        self._count = 0

    @property
    def endpoint(self):
        return "127.0.0.1", self.server.port

    def submit(self, prompt, **fields):
        self._count += 1
        return self.front_end.submit(self._count, prompt=tuple(prompt), **fields)

    def answer(self, prompt, **fields) -> list[int]:
        """The tokens of a request that runs alone."""
        asked = self.submit(prompt, **fields)
        self.front_end.wait_for(asked)
        return self.front_end.tokens.get(asked.request_id, [])

    @property
    def computed_tokens(self) -> int:
        """Of prompts, in all steps so far."""
        return sum(c.length for plan in self.executor.plans for c in plan.chunks if c.kind == 0)

    def stop(self) -> None:
        assert self.driver.stop(join_s=WAIT_S)
        if self.server is not None:
            self.server.close()
