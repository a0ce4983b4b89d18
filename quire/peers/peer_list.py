"""The decode server's list of prefill servers: chooses one for a prompt, and pauses those that failed."""

import hashlib
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
BUSY_PAUSE_S = 0.5


@dataclass
class Peer:
    """A prefill server, as far as it is known here."""

    host: str
    port: int
    num_asked: int = 0  # prompts under way
    num_failures: int = 0  # one after the other
    resume_s: float = 0.0  # it is not asked before

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerList:
    """Any thread may use it.

    Of the peers with the fewest prompts under way the one is asked that the beginning of the prompt hashes to, so that
    prompts that begin alike meet the same prefix cache. A peer that failed is paused for a second, then for two, up
    to a minute, until it has worked once.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], clock: Callable[[], float]) -> None:
        self._peers = [Peer(host, port) for host, port in endpoints]
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def num_available(self) -> int:
        now = self._clock()
        return sum(peer.resume_s <= now for peer in self._peers)

    def choose(self, salt: str, beginning: Sequence[int]) -> Peer | None:
        """The peer for a prompt that begins so; None while all are paused. Ended by one of the
        following."""
        key = salt.encode(errors="surrogatepass") + array("q", beginning).tobytes()
        now = self._clock()
        with self._lock:
            found = [peer for peer in self._peers if peer.resume_s <= now]
            if not found:
                return None
            peer = min(found, key=lambda one: (one.num_asked, _place(key, one)))
            peer.num_asked += 1
            if peer.num_failures:  # one prompt finds out whether it works again
                peer.resume_s = now + _pause_s(peer.num_failures)
            return peer

    def worked(self, peer: Peer) -> None:
        with self._lock:
            peer.num_asked -= 1
            peer.num_failures, peer.resume_s = 0, 0.0

    def is_busy(self, peer: Peer) -> None:
        """It works, and wants no more prompts now."""
        with self._lock:
            peer.num_asked -= 1
            peer.num_failures, peer.resume_s = 0, self._clock() + BUSY_PAUSE_S

    def unused(self, peer: Peer) -> None:
        """The prompt was not wanted any more; nothing is known."""
        with self._lock:
            peer.num_asked -= 1

    def failed(self, peer: Peer) -> float:
        """Returns the seconds that it is paused."""
        with self._lock:
            peer.num_asked -= 1
            peer.num_failures += 1
            pause_s = _pause_s(peer.num_failures)
            peer.resume_s = self._clock() + pause_s
        return pause_s


def _pause_s(num_failures: int) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** min(num_failures - 1, 16), LONGEST_PAUSE_S))


def _place(key: bytes, peer: Peer) -> bytes:
    """Peers in an order that depends on the key, and for one key does not change when others come or go."""
    return hashlib.blake2b(key + str(peer).encode(), digest_size=8).digest()
