"""Prompts that other engines compute for this one, and those that it computes for them."""

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from quire.engine.pages.store import READ_S, DigestOf, PageReader, PageStore
from quire.engine.pages.traffic import within_s
from quire.engine.port import Ports
from quire.errors import InvalidRequest, Overloaded, reason_of, shown
from quire.ipc.messages import PORT_SHIFT, Abort, AllResumed, Event, Failed, Progress, Submit
from quire.peers.bundle import PageForm, PageRange
from quire.peers.messages import BUSY, FAILED, PrefillRequest
from quire.peers.page_client import Fetch, FetchRequest, PageClient
from quire.peers.prefill_server import Computed, RefusedPrompt
from quire.request import Request

log = logging.getLogger(__name__)

PEER_PORT = 2**22  # the port of requests that come from peers; front ends have lower numbers


class PeerSource:
    """Implements `PageSource`: asks peers for the pages of long prompts. Owned by the engine thread."""

    def __init__(self, client: PageClient, store: PageStore, form: PageForm, min_tokens: int, timeout_s: float) -> None:
        self._client = client
        self._store = store
        self._page_size = form.page_size
        self._num_groups = len(form.groups)
        self._min_tokens = min_tokens
        self._timeout_s = timeout_s

    def begin(self, request: Request, adapter_digest: str) -> Fetch | None:
        length = len(request.prompt)
        if request.request_id >> PORT_SHIFT == PEER_PORT or length <= self._min_tokens:
            return None
        first = self._store.num_cached(request)
        num_pages = length // self._page_size - first
        is_short = num_pages < 1 or length - first * self._page_size <= self._min_tokens
        if is_short or num_pages * self._num_groups > self._store.room:
            return None
        prompt = FetchRequest(request.prompt, request.salt, request.adapter, adapter_digest, first, request.priority)
        return self._client.fetch(prompt, within_s(request, self._timeout_s))

    def counted(self, num_unused: int) -> dict[str, int]:
        counted = self._client.counted()
        counted["pulls_received"] -= num_unused
        return counted | {"pulls_unused": num_unused}


class ComputedPrompt:
    """Implements the `Computed` of a prefill server. Where pages were evicted between two pieces, or another adapter
    has got the name of the prompt's, the rest is refused."""

    def __init__(self, request: Request, pages: PageRange, reader: PageReader, has_adapter: Callable[[], bool]) -> None:
        """`has_adapter`: whether the name of its adapter stands for the one that the prompt was computed with."""
        self.range = pages
        self._rows = pages.rows()
        self._request = request
        self._reader = reader
        self._has_adapter = has_adapter

    def read(self, begin: int, count: int) -> memoryview:
        rows = self._rows[begin : begin + count]
        try:
            data = self._reader.read(self._request, rows, self.range.end, self._has_adapter)
        except TimeoutError:
            raise RefusedPrompt(FAILED, f"its pages were not read within {READ_S:g} s") from None
        if data is None:
            raise RefusedPrompt(FAILED, "its pages were evicted, or its adapter replaced, before they were sent")
        return data


class Prefill:
    """Implements the `Prefill` of a prefill server."""

    def __init__(self, request: Request, wanted: PrefillRequest, cancel: Callable[[int], None]) -> None:
        self.request = request
        self.wanted = wanted
        self.result: Future[Computed] = Future()
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel(self.request.request_id)


class Prefills:
    """Runs the prompts of peers as requests of a port of its own, and reads their pages as soon as they are computed.

    `begin` is called by threads of connections, everything else by the engine thread.
    """

    def __init__(self, ports: Ports, store: PageStore, digest_of: DigestOf) -> None:
        self._store = store
        self._digest_of = digest_of
        self._lock = threading.Lock()
        self._live: dict[int, Prefill] = {}
        self._numbers = itertools.count(1)
        self._port = ports.open(self._deliver, PEER_PORT)
        self._reader = PageReader(store, self._port.run)
        self._port.send(AllResumed())  # none comes back after the end of an engine: peers compute them

    def begin(self, wanted: PrefillRequest) -> Prefill:
        self._check_adapter(wanted)
        try:
            if wanted.first < 0:
                raise InvalidRequest(f"first is {wanted.first}; it must be at least 0")
            request = Request(
                request_id=self._port.request_id(next(self._numbers)),
                prompt=tuple(wanted.tokens),
                max_tokens=0,
                salt=wanted.salt.decode(errors="surrogatepass"),
                adapter=wanted.adapter,
                priority=wanted.priority,
                timeout_s=wanted.within_s,
            )
        except (InvalidRequest, UnicodeDecodeError) as error:
            raise RefusedPrompt(FAILED, reason_of(error)) from None
        prefill = Prefill(request, wanted, self._abort)
        with self._lock:
            self._live[request.request_id] = prefill
        self._port.send(Submit(request))
        return prefill

    def _check_adapter(self, wanted: PrefillRequest) -> None:
        digest = self._digest_of(wanted.adapter)
        if digest != wanted.adapter_digest:
            problem = "it is not loaded here" if digest is None else "it has other weights here"
            raise RefusedPrompt(FAILED, f"adapter {shown(wanted.adapter)}: {problem}")

    def _abort(self, request_id: int) -> None:
        if self._pop(request_id) is not None:
            self._port.send(Abort(request_id))

    def _pop(self, request_id: int) -> Prefill | None:
        with self._lock:
            return self._live.pop(request_id, None)

    def _deliver(self, events: list[Event]) -> None:
        """Called on the engine thread, when the pages of ended requests are in the cache."""
        for event in events:
            if isinstance(event, Failed):
                if (prefill := self._pop(event.request_id)) is not None:
                    kind = BUSY if event.kind == Overloaded.kind else FAILED
                    prefill.result.set_exception(RefusedPrompt(kind, event.message))
            elif isinstance(event, Progress):
                for update in event.updates:
                    if update.finish is not None and (prefill := self._pop(update.request_id)) is not None:
                        self._read(prefill)

    def _read(self, prefill: Prefill) -> None:
        try:
            self._check_adapter(prefill.wanted)  # another one may have got the name meanwhile
            wanted = prefill.wanted
            pages = self._store.find(prefill.request, wanted.first)
            computed = ComputedPrompt(
                prefill.request, pages, self._reader, lambda: self._digest_of(wanted.adapter) == wanted.adapter_digest
            )
            prefill.result.set_result(computed)
        except RefusedPrompt as refusal:
            prefill.result.set_exception(refusal)
        except Exception as error:  # the peer computes it
            log.exception("the pages of a prompt cannot be read")
            prefill.result.set_exception(RefusedPrompt(FAILED, reason_of(error)))
