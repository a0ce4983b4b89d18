"""A route: one method of one path, and everything that the server knows about it."""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from quire.errors import NoSuchRoute, QuireError, WrongMethod
from quire.server.service.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]
Types = tuple[Any, ...]  # any of them; empty: no content


class Dialect(Protocol):
    """The part of an API's dialect (quire/server/api/dialect.py) that HTTP needs."""

    @property
    def error_body(self) -> Any:
        """The type of error bodies."""

    @property
    def error_response(self) -> Callable[[QuireError], Response]: ...


class Route(NamedTuple):
    """The application, access control, the OpenAPI document, /docs, metrics and spans are derived from this.

    A handler finds its route as `request.scope["route"]`.
    """

    method: str
    path: str  # {model} stands for any text, others like {version} for text without a slash
    handler: Handler
    dialect: Dialect  # an API's handlers get one of that API
    body: Types = ()
    open_fields: tuple[tuple[str, Any], ...] = ()  # types or JSON schemas of fields that a body's type leaves open
    answer: Types = ()  # of a whole answer
    events: Types = ()  # of a streamed answer
    query: tuple[tuple[str, Any], ...] = ()  # names and JSON schemas of parameters in the address
    example: str = ""  # a body
    media_type: str = "application/json"  # of a whole answer
    generates: bool = False  # runs the model: counted and traced; may be refused for load or time out
    is_open: bool = False  # needs no API key
    is_documented: bool = True

    @property
    def title(self) -> str:
        """The name in logs."""
        return f"{self.method} {self.path}"

    @property
    def name(self) -> str:
        """The name in spans."""
        return getattr(self.handler, "__name__", self.path)


class RouteTable:
    """Finds the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._by_path: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        for route in routes:
            self._by_path.setdefault(route.path, {})[route.method] = route
        for path in [path for path in self._by_path if "{" in path]:
            pattern = re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path.replace("{model}", "(?P<model>.+?)"))
            self._patterns.append((re.compile(pattern, re.DOTALL), self._by_path.pop(path)))

    def find(self, scope: Scope) -> Route:
        """Set `route` and `path_params` in `scope`. Raises for a path or a method that no route has."""
        path, method = scope["path"], scope["method"]
        methods = self._by_path.get(path)
        if methods is None:
            found = ((pattern.fullmatch(path), methods) for pattern, methods in self._patterns)
            match, methods = next(((match, methods) for match, methods in found if match), (None, None))
            if match is None or methods is None:
                raise NoSuchRoute(f"there is no {path[:200]}")
            scope["path_params"] = match.groupdict()
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = {*methods, "HEAD"} if "GET" in methods else methods
            raise WrongMethod(f"{path} takes {' and '.join(sorted(methods))}, not {method}", allowed=allowed)
        scope["route"] = route
        return route
