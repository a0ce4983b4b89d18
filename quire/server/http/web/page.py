"""GET / for browsers: one document, which asks this server and no other."""

from functools import cache
from importlib.resources import files

from starlette.responses import Response

_HEADERS = {
    "cache-control": "no-cache",
    "vary": "accept",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Answers are untrusted text: whatever is in them, nothing else is loaded or asked.
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def page() -> Response:
    return Response(_read(), headers=_HEADERS, media_type="text/html")


def wants_page(accept: str) -> bool:
    """Whether a browser asks. Clients and probes that take anything (`*/*`) get what they always got."""
    return "text/html" in accept


@cache
def _read() -> bytes:
    """The document with its style and its script inside, so that one request gets all of it."""
    folder = files("quire.server.http.web")
    document = folder.joinpath("index.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        document = document.replace(f"/* {name} */", "\n" + folder.joinpath(name).read_text(encoding="utf-8"))
    return document.encode()
