"""A client that holds many streams at little cost, and asks the kernel when each piece arrived.

The time a token was made is in its text (see `ticks`), and the time it arrived is the kernel's: how slow this client
itself is does not show in the delays. Linux only.
"""

import json
import re
import select
import socket
import struct
import time
from dataclasses import dataclass, field

TICK_S = 1e-5
NUM_TICKS = 50_000  # they wrap around after half a second
SO_TIMESTAMPNS = 35  # socket.h; Python does not name it
_TIMESPEC = struct.Struct("qq")
_TOKEN = re.compile(rb'"text":" (\d+)"')


def ticks(now_s: float) -> int:
    return int(now_s / TICK_S) % NUM_TICKS


@dataclass
class Load:
    """What came of one run."""

    took_s: float = 0.0
    num_tokens: int = 0
    num_reads: int = 0
    delays_s: list[float] = field(default_factory=list)  # of the last token of each read
    errors: list[str] = field(default_factory=list)

    def delay_ms(self, percent: int) -> float:
        ordered = sorted(self.delays_s)
        return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1000, 2)


def open_stream(port: int, tokens: int, number: int) -> socket.socket:
    request = {"prompt": [number % NUM_TICKS], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    stream = socket.create_connection(("127.0.0.1", port))
    stream.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    stream.sendall(head.encode() + body)
    return stream


def run_load(port: int, streams: int, tokens: int, within_s: float = 120.0) -> Load:
    """`streams` at once, each to its end. What does not end within the time is an error."""
    load = Load()
    begun = time.monotonic()
    poll = select.epoll()
    open_streams: dict[int, socket.socket] = {}
    received: dict[int, int] = {}
    rests: dict[int, bytes] = {}  # what has come of an event that is not complete; of the head at first
    for number in range(streams):
        stream = open_stream(port, tokens, number)
        open_streams[stream.fileno()] = stream
        received[stream.fileno()] = 0
        rests[stream.fileno()] = b""
        poll.register(stream, select.EPOLLIN)
    while open_streams and time.monotonic() - begun < within_s:
        for fd, _ in poll.poll(1.0):
            data, ancillary, _, _ = open_streams[fd].recvmsg(1 << 18, 64)
            if not data:
                poll.unregister(fd)
                open_streams.pop(fd).close()
                if received[fd] != tokens:
                    load.errors.append(f"{received[fd]} of {tokens} tokens")
                continue
            data = rests[fd] + data
            if not received[fd] and not data.startswith(b"HTTP/1.1 200"):
                load.errors.append(data[:200].decode(errors="replace"))
            whole, _, rest = data.rpartition(b"\n\n")
            rests[fd] = rest
            found = _TOKEN.findall(whole)
            received[fd] += len(found)
            if found and ancillary:
                seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2][:16])
                arrived = ticks(seconds + nanoseconds / 1e9)
                load.delays_s.append((arrived - int(found[-1])) % NUM_TICKS * TICK_S)
                load.num_reads += 1
    load.took_s = time.monotonic() - begun
    load.num_tokens = sum(received.values())
    load.errors += ["not over in time"] * len(open_streams)
    for stream in open_streams.values():
        stream.close()
    return load
