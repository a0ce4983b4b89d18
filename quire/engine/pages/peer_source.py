"""Prompts that other engines compute for this one."""

from quire.engine.pages.traffic import Store, within_s
from quire.ipc.messages import PORT_SHIFT
from quire.peers.bundle import PageForm
from quire.peers.page_client import Fetch, FetchRequest, PageClient
from quire.request import Request

PEER_PORT = 2**22  # the port of requests that come from peers; front ends have lower numbers


class PeerSource:
    """Implements `PageSource`: asks peers for the pages of long prompts. Owned by the engine thread."""

    def __init__(self, client: PageClient, store: Store, form: PageForm, min_tokens: int, timeout_s: float) -> None:
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

    def counted(self) -> dict[str, int]:
        return self._client.counted()
