"""A parser of requests that ignores offers to upgrade the connection."""

from httptools import HttpParserUpgrade, HttpRequestParser


class Parser(HttpRequestParser):
    """Reads requests that offer another protocol as plain HTTP, which RFC 9110, 7.8 allows.

    `HttpRequestParser` ends such a request with its head and takes what follows for the other protocol. It cannot be
    told otherwise. So the head is read a second time, without the offer, and then the body. Clients that offer HTTP/2
    to every server they do not know send bodies in this way.

    The protocol sets `head_without_offer` when a head with an offer is complete, and ignores the end of the message
    while it is set. Then the same request begins anew.
    """

    head_without_offer: bytes | None = None

    def __init__(self, protocol: object) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        """Begin as a new parser does: one that has read `Connection: close` reads no further request."""
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # it is dropped, and the answer is still sent

    def feed_data(self, data: bytes | memoryview) -> None:  # type: ignore[override]
        rest = data
        while True:
            try:
                super().feed_data(rest)
                return
            except HttpParserUpgrade as upgrade:
                if self.head_without_offer is None:
                    raise  # CONNECT
                rest = memoryview(rest)[upgrade.args[0] :]  # not a copy: a segment may hold thousands of requests
            head, self.head_without_offer = self.head_without_offer, None
            self._begin()
            super().feed_data(head)


def head_without_offer(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head of a request, with names in lower case."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, url, version.encode())]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join([*lines, b"\r\n"])
