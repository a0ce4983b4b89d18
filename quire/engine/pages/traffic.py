"""Pages of prompts that come from elsewhere."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from quire.engine.pages.store import DigestOf, PageStore
from quire.peers.bundle import PageBundle, PageForm
from quire.request import Request

INSERTED_BYTES = 16 * 2**20  # in one turn of the engine thread, which takes milliseconds
SHARE_OF_TIME = 0.5  # that a request with a deadline leaves to its pages


class Arriving(Protocol):
    """Pages on their way."""

    @property
    def result(self) -> "Future[PageBundle | None]":
        """None where there are none. It never has an exception."""

    @property
    def begins_again(self) -> bool:
        """The source should be asked again when there is a result: it waits for the pages of another request."""

    def cancel(self) -> None:
        """The pages are not wanted any more."""

    def inserted(self) -> None:
        """As many of the pages as could be entered are entered."""


class PageSource(Protocol):
    """A place that may have pages of prompts. `begin` is called by the engine thread."""

    def begin(self, request: Request, adapter_digest: str) -> Arriving | None:
        """Fetch the pages of a prompt that are not here; None where there are none, or they are not worth it."""

    def counted(self, num_unused: int) -> dict[str, int]:
        """Numbers since the start, `num_unused` of the bundles that were fetched among them. Any thread may read
        them."""


@dataclass(slots=True)
class Incoming:
    """Pages on their way to a request."""

    arriving: Arriving
    adapter_digest: str
    num_inserted: int = 0  # or here already
    is_used: bool = False  # one of them was not


class PageTraffic:
    """Fetches the pages of prompts from a source before their requests enter the engine. Owned by the engine thread.

    Whatever goes wrong, the request enters without them.
    """

    def __init__(self, source: PageSource, store: PageStore, form: PageForm, digest_of: DigestOf) -> None:
        self._source = source
        self._store = store
        self._rows_at_once = max(1, INSERTED_BYTES // form.page_bytes)
        self._digest_of = digest_of
        self._incoming: dict[int, Incoming] = {}  # by request
        self._num_unused = 0  # bundles for which there was no room, or that were here already

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Called until it returns None: then the request should go on. Again when the future is done."""
        incoming = self._incoming.get(request.request_id)
        if incoming is None:
            return self._begin(request)
        bundle, begin = incoming.arriving.result.result(), incoming.num_inserted
        if bundle is None or begin >= bundle.range.num_pages:
            self._num_unused += begin > 0 and not incoming.is_used
            return self._end(request, incoming)
        # Another adapter may have got the name meanwhile.
        is_same = self._digest(request) == incoming.adapter_digest
        entered = self._store.insert(request, bundle, begin, self._rows_at_once) if is_same else None
        if entered is None:
            self._num_unused += 1
            return self._end(request, incoming)
        incoming.is_used = incoming.is_used or entered > 0
        incoming.num_inserted += self._rows_at_once
        return incoming.arriving.result  # which is done: the next turn goes on

    def forget(self, request_id: int) -> None:
        """The request is not wanted any more."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None:
            incoming.arriving.cancel()

    def counted(self) -> dict[str, int]:
        """Numbers of the source since the start. Any thread may read them."""
        return self._source.counted(self._num_unused)

    def _begin(self, request: Request) -> "Future[Any] | None":
        if request.prompt_logprobs is not None:
            return None  # which takes computing all of the prompt here
        digest = self._digest(request)
        if digest is None:
            return None  # the engine refuses it
        arriving = self._source.begin(request, digest)
        if arriving is None:
            return None
        self._incoming[request.request_id] = Incoming(arriving, digest)
        return arriving.result

    def _digest(self, request: Request) -> str | None:
        return request.adapter_digest or self._digest_of(request.adapter)

    def _end(self, request: Request, incoming: Incoming) -> "Future[Any] | None":
        del self._incoming[request.request_id]
        incoming.arriving.inserted()
        return self._begin(request) if incoming.arriving.begins_again else None


def within_s(request: Request, most_s: float) -> float:
    """The time that a request leaves to its pages."""
    timeouts_s = [timeout_s for timeout_s in (request.timeout_s, request.queue_timeout_s) if timeout_s is not None]
    return min([most_s, *(SHARE_OF_TIME * timeout_s for timeout_s in timeouts_s)])
