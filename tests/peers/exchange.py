"""Both ends of an exchange of pages in one process, with prompts that are computed by hand."""

import threading
from concurrent.futures import Future

from quire.peers.bundle import PageBundle, PageForm, PageRange
from quire.peers.messages import FAILED, PrefillRequest
from quire.peers.page_client import FetchRequest, PageClient
from quire.peers.prefill_server import PrefillServer, RefusedPrompt

SECRET = b"a secret that the tests share"
FACTS = {"model": "tiny", "version": "1"}
FORM = PageForm(page_size=4, page_bytes=1000, groups=(None,))


class HandMade:
    """A prompt that the test computes: it calls `finish`."""

    def __init__(self, ask: PrefillRequest, form: PageForm) -> None:
        self.ask = ask
        self.result: Future = Future()
        self.cancelled = threading.Event()
        self._form = form

    def cancel(self) -> None:
        self.cancelled.set()

    def finish(self) -> PageBundle:
        bundle = bundle_of(self.ask.tokens, self.ask.first, self._form)
        self.result.set_result(Computed(bundle, self._form.page_bytes))
        return bundle


class Computed:
    def __init__(self, bundle: PageBundle, page_bytes: int) -> None:
        self.range = bundle.range
        self._data = bundle.data
        self._page_bytes = page_bytes
        self.gone_from: int | None = None  # pages from here on were evicted

    def read(self, begin: int, count: int) -> memoryview:
        if self.gone_from is not None and begin + count > self.gone_from:
            raise RefusedPrompt(FAILED, "evicted")
        return self._data[begin * self._page_bytes : (begin + count) * self._page_bytes]


def bundle_of(tokens, first: int, form: PageForm = FORM) -> PageBundle:
    """Pages whose bytes say which page of which group they are."""
    end = len(tokens) // form.page_size
    firsts = [max(first, form.first_needed(group, end)) for group in range(len(form.groups))]
    rows = [(group, index) for group, begin in enumerate(firsts) for index in range(begin, end)]
    data = b"".join(bytes([group, index % 256]) * (form.page_bytes // 2) for group, index in rows)
    return PageBundle(PageRange(tuple(firsts), end), memoryview(data))


class PrefillEnd:
    """A prefill server whose prompts the test computes, or that computes them at once."""

    def __init__(self, *, at_once: bool = True, form: PageForm = FORM, facts=FACTS, secret: bytes = SECRET) -> None:
        self.asked: list[HandMade] = []
        self.came = threading.Semaphore(0)
        self._at_once = at_once
        self._form = form
        self.refusal: Exception | None = None
        self.server = PrefillServer(("127.0.0.1", 0), secret, facts, form)
        self.server.start(self._begin)
        self.endpoint = "127.0.0.1", self.server.port

    def _begin(self, ask: PrefillRequest) -> HandMade:
        if self.refusal is not None:
            raise self.refusal
        prefill = HandMade(ask, self._form)
        self.asked.append(prefill)
        if self._at_once:
            prefill.finish()
        self.came.release()
        return prefill


def client_of(*endpoints, form: PageForm = FORM, facts=FACTS, secret: bytes = SECRET, **more) -> PageClient:
    return PageClient(endpoints, secret, facts, form, **more)


def prompt(length: int = 40, first: int = 0, **changes) -> FetchRequest:
    return FetchRequest(tuple(range(length)), "salt", None, "", first, 0)._replace(**changes)
