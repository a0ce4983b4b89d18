"""GET / for browsers: one HTML document, which sends requests to this server only."""

from functools import cache
from pathlib import Path

HTML_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-cache",
    "vary": "accept",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Answers are untrusted text: nothing in them may load or request anything.
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def wants_html(accept: str) -> bool:
    """True for browsers; clients and probes that accept anything (`*/*`) get the plain answer."""
    return "text/html" in accept


@cache
def chat_html() -> bytes:
    """The document with its style and its script inside: one request gets all."""
    folder = Path(__file__).parent
    document = (folder / "index.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        document = document.replace(f"/* {name} */", "\n" + (folder / name).read_text(encoding="utf-8"))
    return document.encode()
