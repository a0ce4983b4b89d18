"""The prefill server's end: it computes prompts for decode servers and sends them the pages."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Protocol

from quire.errors import InvalidSetting
from quire.group.facts import difference
from quire.group.handshake import HandshakeFailed, admit
from quire.group.link import Link, LinkLost
from quire.peers import messages
from quire.peers.bundle import PageForm, PageRange
from quire.peers.messages import (
    BEAT_S,
    BUSY,
    DIFFERS,
    FAILED,
    HELD_S,
    PIECE_BYTES,
    PURPOSE,
    Computing,
    FromDecode,
    PrefillRequest,
    Refused,
)

log = logging.getLogger(__name__)

MAX_STRANGERS = 8  # connections that have not shown that they know the secret; more are dropped
MAX_ASKED = 64  # prompts at a time; more are refused
READ_BYTES = 32 * 2**20  # of pages that are copied from the device at a time, or one page where that is larger
MAX_READS = 2  # such copies at a time
MAX_HELD_BYTES = 2 * 2**30  # of pages that wait to be sent; a single prompt may have more
MAX_WITHIN_S = 3600.0
LISTEN_AGAIN_S = 1.0
SETTLE_S = 1.0  # for the other end to read a refusal
STRANGERS_EVERY_S = 10.0  # in the log
SENT, LOST = "sent", "lost"
SERVED = (SENT, LOST, BUSY, DIFFERS, FAILED)  # outcomes of prompts


class RefusedPrompt(Exception):
    """The prompt is not computed here. `kind` is one of the kinds of refusals."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Computed(Protocol):
    """A prompt that is computed. Used by the threads of its connection."""

    range: PageRange

    def read(self, begin: int, count: int) -> memoryview:
        """`count` of its pages, from the `begin`-th on. Waits for them. Raises RefusedPrompt where they are gone."""


class Prefill(Protocol):
    """A prompt under way. Used by the threads of its connection."""

    result: "Future[Computed]"  # or RefusedPrompt

    def cancel(self) -> None:
        """The pages are not wanted any more. Does nothing where the prompt is computed."""


Begin = Callable[[PrefillRequest], Prefill]  # raises RefusedPrompt


class PrefillServer:
    """Listens for decode servers. Every connection has two threads, and all that it holds ends with it.

    A connection ends at the latest HELD_S after the time that the decode server waits for its prompt.
    """

    def __init__(self, endpoint: tuple[str, int], secret: bytes, facts: Mapping[str, str], form: PageForm) -> None:
        """Raises InvalidSetting where it cannot listen."""
        self._secret = secret
        self._facts = facts
        self._form = form
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._reading = threading.Semaphore(MAX_READS)
        self._lock = threading.Lock()
        self._stranger_told_s: float | None = None
        self._is_closed = False
        self.num_asked = 0  # prompts that are being computed or sent
        self.held_bytes = 0  # of the pages of these, at most
        self.counters: Counter[str] = Counter()
        host, port = endpoint
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise InvalidSetting(f"peer_address: cannot listen on {host}:{port}: {error.strerror}") from error

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def counted(self) -> dict[str, int]:
        """Numbers since the start, those that are 0 included. Any thread may read them."""
        names = (*(f"served_{outcome}" for outcome in SERVED), "sent_pages", "sent_bytes")
        return {name: self.counters[name] for name in names}

    def start(self, begin: Begin) -> None:
        """Answer from now on."""
        self._begin = begin
        threading.Thread(target=self._accept, name="quire-peers", daemon=True).start()
        log.info("prompts of decode servers are computed for those that connect to port %d", self.port)

    def close(self) -> None:
        """Accept no more connections. Those that are there go on."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a connection of a peer cannot be accepted: %s", error)
                time.sleep(LISTEN_AGAIN_S)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._welcome, args=(connection,), name="quire-peer", daemon=True).start()
            except RuntimeError as error:  # the system has no more threads; this one goes on for the next peers
                log.warning("a connection of a peer is dropped: %s", error)
                self._strangers.release()
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            try:
                keys = admit(connection, self._secret, purpose=PURPOSE)
                link: Link[FromDecode] = Link(connection, keys, FromDecode, HELD_S)
                wanted = link.receive()
            finally:
                self._strangers.release()
        except (HandshakeFailed, LinkLost, OSError) as error:
            self._note_stranger(str(error))
            connection.close()
            return
        try:
            outcome = self._answer(link, wanted) if isinstance(wanted, PrefillRequest) else LOST
        except (LinkLost, OSError) as error:
            outcome = LOST
            log.info("a decode server (%s) is gone: %s", link.peer, error)
        except Exception:  # of ours; the decode server computes the prompt itself
            outcome = FAILED
            log.exception("the prompt of a decode server fails")
        finally:
            link.close()
        self._count(f"served_{outcome}", 1)

    def _answer(self, link: "Link[FromDecode]", wanted: PrefillRequest) -> str:
        """The outcome, in a word."""
        gone, changed = threading.Event(), threading.Event()  # the latter also when the prompt is computed

        def leave(_: object) -> None:
            gone.set()
            changed.set()

        link.allow_silence(HELD_S + min(max(0.0, wanted.within_s), MAX_WITHIN_S))  # the decode server only waits
        link.start(leave, leave)
        try:
            if (found := difference(self._facts, wanted.facts, "prefill server", "decode server")) is not None:
                raise RefusedPrompt(DIFFERS, found)
            with self._place(wanted):
                prefill = self._begin(wanted)
                prefill.result.add_done_callback(lambda _: changed.set())
                try:
                    while not changed.wait(BEAT_S):
                        link.send(Computing())
                    return LOST if gone.is_set() else self._send(link, prefill.result.result(), gone)
                finally:
                    prefill.cancel()
        except RefusedPrompt as refusal:
            log.info("a prompt of a decode server (%s) is refused: %s", link.peer, refusal)
            link.send(Refused(refusal.kind, str(refusal)))
            gone.wait(SETTLE_S)  # the other end reads it and closes
            return refusal.kind

    @contextlib.contextmanager
    def _place(self, wanted: PrefillRequest) -> Iterator[None]:
        """Room for a prompt and its pages."""
        form = self._form
        count = max(0, len(wanted.tokens) // form.page_size - wanted.first) * len(form.groups)
        with self._lock:
            if self.num_asked >= MAX_ASKED:
                raise RefusedPrompt(BUSY, f"{MAX_ASKED} prompts of peers are under way")
            if self.held_bytes and self.held_bytes + count * form.page_bytes > MAX_HELD_BYTES:
                held = f"pages of peers under way have {self.held_bytes} bytes"
                raise RefusedPrompt(BUSY, f"{held}; the limit is {MAX_HELD_BYTES}")
            self.num_asked += 1
            self.held_bytes += count * form.page_bytes
        try:
            yield
        finally:
            with self._lock:
                self.num_asked -= 1
                self.held_bytes -= count * form.page_bytes

    def _send(self, link: "Link[FromDecode]", computed: Computed, gone: threading.Event) -> str:
        pages, size = computed.range, self._form.page_bytes
        link.send(messages.Computed(list(pages.firsts), pages.end, size))
        read, sent = max(1, READ_BYTES // size), max(1, PIECE_BYTES // size) * size
        for begin in range(0, pages.num_pages, read):
            with self._reading:
                data = computed.read(begin, min(read, pages.num_pages - begin))
            for at in range(0, len(data), sent):
                if gone.is_set():
                    return LOST
                piece = data[at : at + sent]
                link.send_bytes(piece)
                self._count("sent_pages", len(piece) // size)
                self._count("sent_bytes", len(piece))
        # To close first could lose what is on its way.
        return SENT if gone.wait(HELD_S) else LOST

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self.counters[name] += count

    def _note_stranger(self, why: str) -> None:
        """Strangers cannot fill the log."""
        with self._lock:
            self.counters["strangers"] += 1
            count, now = self.counters["strangers"], time.monotonic()
            if self._stranger_told_s is not None and now - self._stranger_told_s < STRANGERS_EVERY_S:
                return
            self._stranger_told_s = now
        log.warning("connections to peer_address dropped so far: %d; the last one: %s", count, why)
