"""Pages of prompts that other engines compute for this one."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from quire.ipc.messages import PORT_SHIFT
from quire.peers.bundle import PageBundle, PageForm, PageRange
from quire.peers.page_client import Fetch, PageClient, Prompt
from quire.request import Request

log = logging.getLogger(__name__)

PEER_PORT = 2**22  # the port of requests that come from peers; front ends have lower numbers
INSERTED_BYTES = 16 * 2**20  # in one turn of the engine thread, which takes milliseconds
SHARE_OF_TIME = 0.5  # that a request with a deadline leaves to a peer


class Store(Protocol):
    """The pages of this engine. Used by the engine thread."""

    @property
    def room(self) -> int:
        """The most pages of a prompt that can be entered."""

    def num_cached(self, request: Request) -> int:
        """Pages of the prompt that are here, from its beginning."""

    def insert(self, request: Request, bundle: PageBundle, begin: int, count: int) -> bool:
        """Enter pages of the bundle from the `begin`-th on, at most `count`. False where none was entered: there is no
        room, or they are here already."""

    def find(self, request: Request, first: int) -> PageRange:
        """The pages of the prompt from `first` on, as far as they are here."""

    def read(self, request: Request, rows: Sequence[tuple[int, int]], end: int) -> Callable[[], memoryview] | None:
        """Read pages, by their place in the prompt and their group, of those that end at page `end`; None where they
        are not here any more. Returns at once; any thread may call the function, which waits for them."""


@dataclass(slots=True)
class Incoming:
    """Pages on their way to a request."""

    fetch: Fetch
    adapter_digest: str
    num_inserted: int = 0


class PageTraffic:
    """Fetches the pages of long prompts before their requests enter the engine. Owned by the engine thread.

    Whatever goes wrong, the request enters without them.
    """

    def __init__(
        self,
        client: PageClient,
        store: Store,
        form: PageForm,
        min_tokens: int,
        timeout_s: float,
        digest_of: Callable[[str | None], str | None],
    ) -> None:
        """`digest_of` an adapter by its name; None where there is none."""
        self._client = client
        self._store = store
        self._page_size = form.page_size
        self._num_groups = len(form.windows)
        self._rows_at_once = max(1, INSERTED_BYTES // form.page_bytes)
        self._min_tokens = min_tokens
        self._timeout_s = timeout_s
        self._digest_of = digest_of
        self._incoming: dict[int, Incoming] = {}  # by request
        self._num_unused = 0  # bundles for which there was no room

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Called until it returns None: then the request should be added. Again when the future is done."""
        found = self._incoming.get(request.request_id)
        if found is None:
            return self._begin(request)
        bundle, begin = found.fetch.result.result(), found.num_inserted
        is_over = bundle is None or begin >= bundle.range.num_pages
        if bundle is not None and not is_over:
            # Another adapter may have got the name meanwhile.
            is_same = self._digest_of(request.adapter) == found.adapter_digest
            if not is_same or not self._store.insert(request, bundle, begin, self._rows_at_once):
                self._num_unused += 1
                is_over = True
        if is_over:
            del self._incoming[request.request_id]
            return None
        found.num_inserted += self._rows_at_once
        return found.fetch.result  # which is done: the next turn goes on

    def forget(self, request_id: int) -> None:
        """The request is not wanted any more."""
        found = self._incoming.pop(request_id, None)
        if found is not None:
            found.fetch.cancel()

    def counters(self) -> dict[str, int]:
        """Numbers since the start. Any thread may read them."""
        counted = self._client.counted()
        counted["pulls_received"] -= self._num_unused
        return counted | {"pulls_unused": self._num_unused}

    def _begin(self, request: Request) -> "Future[Any] | None":
        if request.request_id >> PORT_SHIFT == PEER_PORT or request.prompt_logprobs is not None:
            return None  # which takes computing all of the prompt here
        length = len(request.prompt)
        if length <= self._min_tokens:
            return None
        digest = self._digest_of(request.adapter)
        if digest is None:
            return None  # the engine refuses it
        first = self._store.num_cached(request)
        num_pages = length // self._page_size - first
        is_short = num_pages < 1 or length - first * self._page_size <= self._min_tokens
        if is_short or num_pages * self._num_groups > self._store.room:
            return None
        prompt = Prompt(request.prompt, request.salt, request.adapter, digest, first, request.priority)
        limits_s = [one * SHARE_OF_TIME for one in (request.timeout_s, request.queue_timeout_s) if one is not None]
        fetch = self._client.fetch(prompt, min([self._timeout_s, *limits_s]))
        if fetch is None:
            return None
        self._incoming[request.request_id] = Incoming(fetch, digest)
        return fetch.result
