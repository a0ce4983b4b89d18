"""Messages between a decode server and a prefill server: plain data, sent as msgpack.

A connection is for one prompt. The decode server asks; the prefill server says every second that it computes, then what
it has, then sends the pages; the decode server frees them. Either end may close the connection at any moment, which
frees everything too.
"""

import msgspec

PURPOSE = b"pages"  # of the handshake
BEAT_S = 1.0  # between two words of a prefill server that computes
SILENCE_S = 4.0  # after which a prefill server is lost
HELD_S = 30.0  # that a decode server has to take its pages once its prompt is computed
PIECE_BYTES = 4 * 2**20  # of pages in one frame, or one page where that is larger

BUSY, DIFFERS, FAILED = "busy", "differs", "failed"  # kinds of refusals


class PrefillRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute a prompt. `facts` by name must be those of the prefill server."""

    facts: dict[str, str]
    tokens: list[int]
    salt: bytes
    adapter: str | None
    adapter_digest: str
    first: int  # pages that the decode server has, from the beginning of the prompt
    within_s: float
    priority: int


class Free(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The decode server has all pages, or wants none any more."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    kind: str
    reason: str


class Computing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The prompt waits or is being computed."""


class Computed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The pages that follow: of each page group those from `firsts` on, up to `end`, one group after the other.

    They follow as frames that are no messages, of whole pages: the bytes of all their layers."""

    firsts: list[int]
    end: int
    page_bytes: int


FromDecode = PrefillRequest | Free
FromPrefill = Refused | Computing | Computed
