"""Asks a server whether it would answer: python -m quire.server.health_check [ADDRESS]

A container runs this every few seconds, so that it imports little: `quire health` does the same.
"""

import http.client
import json
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from quire.errors import EngineFailed, InvalidSetting, QuireError, listed
from quire.server.running_servers import running_servers

TIMEOUT_S = 4.0  # less than the container gives the check
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of servers that listen on all addresses


def check_health(address: str | None = None) -> str:
    """The address of the server, which is the one of this user that runs on this machine unless it is given. Raises the
    reason why it would not answer."""
    address = address or _only_one()
    try:
        found = urlsplit(address if "//" in address else f"http://{address}")
        host, port = found.hostname, found.port
    except ValueError:
        host = port = None
    if not host or found.scheme not in ("http", "https"):
        raise InvalidSetting(f"ADDRESS is {address!r}; it must be as in http://127.0.0.1:8000")
    try:
        connection = _connection(found.scheme, _LOCAL.get(host, host), port)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailed(f"{address}: {error or type(error).__name__}") from error
    if status != 200:
        raise EngineFailed(f"{address}: {_reason(body) or f'HTTP {status}'}")
    return address


def _only_one() -> str:
    found = running_servers()
    if len(found) == 1:
        return found[0]
    if not found:
        raise EngineFailed("no server of this user runs on this machine; give the address of another one")
    raise InvalidSetting(f"{len(found)} servers run on this machine; give the address of one: {listed(found)}")


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    import ssl  # takes time, and most servers in containers do without

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is that of a name, or self-signed; nothing secret is sent
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def _reason(body: bytes) -> str | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return str(found.get("reason")) if isinstance(found, dict) and found.get("reason") else None


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    try:
        print(check_health(*arguments[:1]))
    except QuireError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
