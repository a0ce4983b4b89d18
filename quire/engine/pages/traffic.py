"""Pages of prompts that come from elsewhere."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from quire.peers.bundle import PageBundle, PageForm, PageRange
from quire.request import Request

INSERTED_BYTES = 16 * 2**20  # in one turn of the engine thread, which takes milliseconds
SHARE_OF_TIME = 0.5  # that a request with a deadline leaves to its pages

DigestOf = Callable[[str | None], str | None]  # an adapter's name to the digest of its weights; None where none is


class Store(Protocol):
    """The pages of this engine. Used by the engine thread."""

    @property
    def room(self) -> int:
        """The most pages of a prompt that can be entered."""

    def num_cached(self, request: Request) -> int:
        """Pages of the prompt that are here, from its beginning."""

    def names(self, request: Request, adapter_digest: str) -> list[bytes]:
        """A name for each whole page of the prompt, the same in every process."""

    def insert(self, request: Request, bundle: PageBundle, begin: int, count: int) -> int | None:
        """Enter pages of the bundle from the `begin`-th on, at most `count`. Returns the number of those that were not
        here already; None where there is no room."""

    def find(self, request: Request, first: int) -> PageRange:
        """The pages of the prompt from `first` on, as far as they are here."""

    def read(self, request: Request, rows: Sequence[tuple[int, int]], end: int) -> Callable[[], memoryview] | None:
        """Read pages, by their place in the prompt and their group, of those that end at page `end`; None where they
        are not here any more. Returns at once; any thread may call the function, which waits for them."""


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

    def counted(self) -> dict[str, int]:
        """Numbers since the start. Any thread may read them."""


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

    def __init__(self, source: PageSource, store: Store, form: PageForm, digest_of: DigestOf) -> None:
        self._source = source
        self._store = store
        self._rows_at_once = max(1, INSERTED_BYTES // form.page_bytes)
        self._digest_of = digest_of
        self._incoming: dict[int, Incoming] = {}  # by request
        self.num_unused = 0  # bundles for which there was no room, or that were here already

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Called until it returns None: then the request should go on. Again when the future is done."""
        found = self._incoming.get(request.request_id)
        if found is None:
            return self._begin(request)
        bundle, begin = found.arriving.result.result(), found.num_inserted
        if bundle is None or begin >= bundle.range.num_pages:
            self.num_unused += begin > 0 and not found.is_used
            return self._end(request, found)
        # Another adapter may have got the name meanwhile.
        is_same = self._digest(request) == found.adapter_digest
        entered = self._store.insert(request, bundle, begin, self._rows_at_once) if is_same else None
        if entered is None:
            self.num_unused += 1
            return self._end(request, found)
        found.is_used = found.is_used or entered > 0
        found.num_inserted += self._rows_at_once
        return found.arriving.result  # which is done: the next turn goes on

    def forget(self, request_id: int) -> None:
        """The request is not wanted any more."""
        found = self._incoming.pop(request_id, None)
        if found is not None:
            found.arriving.cancel()

    def counted(self) -> dict[str, int]:
        """Numbers of the source since the start. Any thread may read them."""
        return self._source.counted()

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

    def _end(self, request: Request, found: Incoming) -> "Future[Any] | None":
        del self._incoming[request.request_id]
        found.arriving.inserted()
        return self._begin(request) if found.arriving.begins_again else None


def within_s(request: Request, most_s: float) -> float:
    """The time that a request leaves to its pages."""
    limits_s = [one * SHARE_OF_TIME for one in (request.timeout_s, request.queue_timeout_s) if one is not None]
    return min([most_s, *limits_s])
