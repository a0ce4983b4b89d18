"""The decode server's end: it asks prefill servers for the pages of prompts."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.group.handshake import HandshakeFailed, enter
from quire.group.link import Link, LinkLost
from quire.peers.bundle import PageBundle, PageForm, PageRange, problem
from quire.peers.messages import (
    BUSY,
    DIFFERS,
    FAILED,
    PURPOSE,
    SILENCE_S,
    Computed,
    Computing,
    Free,
    FromPrefill,
    PrefillRequest,
    Refused,
)
from quire.peers.page_arrival import PageArrival
from quire.peers.peer_list import Peer, PeerList

log = logging.getLogger(__name__)

MAX_FETCHES = 64  # prompts under way; more are computed here
MAX_FETCHED_BYTES = 2 * 2**30  # of pages that come, or wait to be entered; a single prompt may have more
CONNECT_S = 2.0  # also for the handshake
# Outcomes besides BUSY, DIFFERS and FAILED, a fault of this server. After all but the first it computes the prompt.
RECEIVED = "received"
REFUSED = "refused"  # this prompt, for a reason of its own
LATE, LOST, INVALID, CANCELLED = "late", "lost", "invalid", "cancelled"
NO_PEER, FULL = "no_peer", "full"  # no peer was asked: all are paused; too many prompts are under way
OUTCOMES = (RECEIVED, REFUSED, BUSY, DIFFERS, FAILED, LATE, LOST, INVALID, CANCELLED, NO_PEER, FULL)


class FetchRequest(NamedTuple):
    """A prompt to fetch the pages of. `first`: pages that are here, from its beginning."""

    tokens: Sequence[int]
    salt: str
    adapter: str | None
    adapter_digest: str
    first: int
    priority: int


class InvalidPages(Exception):
    """The peer sends something else than it should."""


class RefusedByPeer(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Fetch(PageArrival):
    """A prompt that a peer computes."""

    _link: "Link[FromPrefill] | None" = None

    def stop(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()  # wakes the thread that reads

    def use(self, link: "Link[FromPrefill]") -> None:
        with self._lock:
            self._link = link
            if self.is_cancelled or self.is_late:
                link.close()


class PageClient:
    """Asks one peer for the pages of a prompt, on a thread for each, and never takes longer than it is given.

    No failure of a peer is more than the lack of its pages. Any thread may use it.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        secret: bytes,
        facts: Mapping[str, str],
        form: PageForm,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers = PeerList(endpoints, clock)
        self._secret = secret
        self._facts = dict(facts)
        self._form = form
        self._clock = clock
        self._lock = threading.Lock()
        self._num_fetches = 0
        self._fetched_bytes = 0
        self.counters: Counter[str] = Counter()

    def counted(self) -> dict[str, int]:
        """Numbers since the start, those that are 0 included. Any thread may read them."""
        names = (*(f"pulls_{outcome}" for outcome in OUTCOMES), "received_pages", "received_bytes")
        return {name: self.counters[name.removeprefix("pulls_")] for name in names}

    def fetch(self, prompt: FetchRequest, within_s: float) -> Fetch | None:
        """Ask for the pages; None where no peer can be asked now. Returns at once."""
        size = self._form.page_size
        most = (len(prompt.tokens) // size - prompt.first) * len(self._form.groups) * self._form.page_bytes
        with self._lock:
            if self._num_fetches >= MAX_FETCHES or (
                self._fetched_bytes and self._fetched_bytes + most > MAX_FETCHED_BYTES
            ):
                self.counters[FULL] += 1
                return None
            peer = self.peers.choose(prompt.salt, prompt.tokens[:size])
            if peer is None:
                self.counters[NO_PEER] += 1
                return None
            self._num_fetches += 1
            self._fetched_bytes += most

        def end() -> None:
            with self._lock:
                self._num_fetches -= 1

        def release() -> None:
            with self._lock:
                self._fetched_bytes -= most

        fetch = Fetch(release)

        def run() -> None:
            bundle = self._run(fetch, peer, prompt, within_s)
            end()
            fetch.end(bundle)

        try:
            threading.Thread(target=run, name="quire-fetch", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            end()
            release()
            self.peers.unused(peer)
            raise
        return fetch

    def _run(self, fetch: Fetch, peer: Peer, prompt: FetchRequest, within_s: float) -> PageBundle | None:
        until_s = self._clock() + within_s
        timer = threading.Timer(within_s, fetch.expire)
        timer.daemon = True
        bundle, why = None, ""
        try:
            timer.start()
            bundle = self._exchange(fetch, peer, prompt, until_s)
            outcome = RECEIVED
        except RefusedByPeer as refusal:
            outcome, why = refusal.kind if refusal.kind in (BUSY, DIFFERS) else REFUSED, str(refusal)
        except InvalidPages as error:
            outcome, why = INVALID, str(error)
        except (OSError, HandshakeFailed, LinkLost) as error:
            outcome, why = LATE if fetch.is_late else LOST, str(error)
            if fetch.is_cancelled:
                outcome = CANCELLED
        except Exception:  # of ours
            outcome = FAILED
            log.exception("the pages of a prompt cannot be fetched")
        finally:
            timer.cancel()
        self._settle(peer, outcome, why, within_s)
        return bundle

    def _settle(self, peer: Peer, outcome: str, why: str, within_s: float) -> None:
        with self._lock:
            self.counters[outcome] += 1
        if outcome == RECEIVED:
            self.peers.worked(peer)
        elif outcome == BUSY:
            self.peers.is_busy(peer)
        elif outcome in (CANCELLED, REFUSED, FAILED):
            self.peers.unused(peer)
        else:
            why = f"it took longer than {within_s:g} s" if outcome == LATE else why
            pause_s = self.peers.failed(peer)
            log.warning("peer %s: %s; prompts are computed here, it is asked again in %g s", peer, why, pause_s)

    def _exchange(self, fetch: Fetch, peer: Peer, prompt: FetchRequest, until_s: float) -> PageBundle:
        left_s = max(0.001, min(CONNECT_S, until_s - self._clock()))
        with socket.create_connection((peer.host, peer.port), timeout=left_s) as connection:
            keys = enter(connection, self._secret, left_s, PURPOSE)
            link: Link[FromPrefill] = Link(connection, keys, FromPrefill, SILENCE_S)
            fetch.use(link)
            try:
                link.send(self._ask(prompt, max(0.001, until_s - self._clock())))
                bundle = self._receive(link, prompt)
                link.send(Free())
            finally:
                link.close()
        return bundle

    def _ask(self, prompt: FetchRequest, within_s: float) -> PrefillRequest:
        return PrefillRequest(
            self._facts,
            list(prompt.tokens),
            prompt.salt.encode(errors="surrogatepass"),  # clients may send half of a surrogate pair
            prompt.adapter,
            prompt.adapter_digest,
            prompt.first,
            within_s,
            prompt.priority,
        )

    def _receive(self, link: "Link[FromPrefill]", prompt: FetchRequest) -> PageBundle:
        while isinstance(message := link.receive(), Computing):
            pass
        if isinstance(message, Refused):
            raise RefusedByPeer(message.kind, message.reason)
        if not isinstance(message, Computed):
            raise InvalidPages(f"it sent {type(message).__name__} before it had computed the prompt")
        pages = PageRange(tuple(message.firsts), message.end)
        wrong = problem(self._form, pages, message.page_bytes, prompt.first, len(prompt.tokens))
        if wrong is not None:
            raise InvalidPages(wrong)
        count, size = pages.num_pages, self._form.page_bytes
        data = memoryview(bytearray(count * size))
        at = 0
        while at < len(data):
            piece = link.receive_into(data[at:])
            if isinstance(piece, Refused):
                raise RefusedByPeer(piece.kind, piece.reason)
            if not isinstance(piece, int) or not piece or piece % size:
                what = f"{piece} bytes" if isinstance(piece, int) else type(piece).__name__
                raise InvalidPages(f"it sent {what} where {count - at // size} more pages were due")
            at += piece
            with self._lock:
                self.counters["received_pages"] += piece // size
                self.counters["received_bytes"] += piece
        return PageBundle(pages, data)
