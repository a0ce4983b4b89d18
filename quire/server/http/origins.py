"""The web pages that may send requests."""

from ipaddress import ip_address

from starlette.types import Scope

from quire.errors import ForbiddenOrigin, shown
from quire.server.settings import ServerSettings

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Origins:
    """Refuses web pages of other origins, which a browser lets send requests to any address that it reaches itself.

    With every request that makes a server work, a browser sends the origin of the page. Where an API key is needed,
    pages of other origins do not have it: then only their preflights are refused.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._allowed = frozenset(settings.allowed_origins)
        self._has_keys = bool(settings.keys)
        self._is_on_loopback = _is_loopback(settings.host)

    def check(self, scope: Scope) -> None:
        """Raise for a request of a page that may send none. Preflights of the origins that may do not come here."""
        if not any(name == b"origin" for name, _ in scope["headers"]):
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers[b"origin"]
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if not is_preflight and (self._has_keys or self._is_allowed(origin, headers)):
            return
        remedy = "--cors-allow-origin" if self._has_keys else "--cors-allow-origin, or an API key"
        host = headers.get(b"host", "")
        if self._is_on_loopback and not _leads_to_loopback(host):
            raise ForbiddenOrigin(
                f"Host is {shown(host)}, a name that its owner can make lead to loopback, where this server listens; "
                f"pages of another address than 127.0.0.1 or localhost need {remedy}"
            )
        raise ForbiddenOrigin(
            f"Origin is {shown(origin)}, which is not that of this server, {shown(host)}; pages of other origins need "
            f"{remedy}"
        )

    def _is_allowed(self, origin: str, headers: dict[bytes, str]) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        # No page can write this header. Browsers send it by HTTPS and to loopback addresses only, so never to a name
        # that was made to lead here (DNS rebinding).
        if headers.get(b"sec-fetch-site") == "same-origin":
            return True
        host = headers.get(b"host", "")
        if self._is_on_loopback and not _leads_to_loopback(host):
            return False
        # A proxy may have replaced Host. Pages of other origins cannot write the header that has the first one.
        scheme, _, address = origin.lower().partition("://")
        port = _DEFAULT_PORTS.get(scheme, "")
        known = (host, headers.get(b"x-forwarded-host", ""))
        return bool(address) and address in (one.lower().removesuffix(port) for one in known)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _leads_to_loopback(host: str) -> bool:
    """False for a name: its owner can make it lead to any address. Names below `localhost` have no owner."""
    name = host.lower()
    name = name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0]
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True
