"""The imports that each part may have. A fault is reported as file, line and import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
GROUND = frozenset({"errors", "layer_kind", "reach", "request", "retry_reservations", "seeds", "settings"})
OWN_FILES = frozenset({"files.cache_folder", "files.regular_file"})  # how files of one's own are kept and read

# The server's floors, each above those that it may import. What every API needs of HTTP lies below the APIs.
BELOW_SERVER = frozenset({"ipc", "text", "grammar", "files"}) | GROUND
SERVER = BELOW_SERVER | {
    "server.settings",
    "server.offload",
    "server.tenant",
    "server.caller",
    "server.api_keys",
    "server.rate_limits",
    "server.running_servers",
}
SERVICE = SERVER | {"server.observe"}
HTTP_BASE = tuple(
    f"server.http.{name}"
    for name in ("connection", "parser", "unchunked", "sse", "body", "route", "health", "unhealthy")
)
APIS = SERVICE | {"server.service", *HTTP_BASE}
# An API knows the modules that all of them share, and no other API; that of TGI serves chats of OpenAI's as well.
SHARED = (
    "answer_reader", "chat", "dialect", "field_names", "grammars", "job", "message_keys", "prompts", "sampling",
    "tool_use", "validation",
)  # fmt: skip
HTTP = APIS | {"server.api"}

# What each part of quire may import of quire. A name with dots is a part of a part, and has rules of its own.
MAY_IMPORT: dict[str, frozenset[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "settings": GROUND | {"files.regular_file"},  # secrets are in files
    "core": frozenset({"retry_reservations", "errors", "reach", "request"}),
    "files": frozenset({"errors", "settings.machine", "settings.config"}),
    "text": frozenset({"errors", "request", "files"}),
    "grammar": frozenset({"errors", "request", "text"}),
    "ops": GROUND | OWN_FILES,
    "models": frozenset({"ops", "files"}) | GROUND,
    "executor": frozenset({"core.plan", "core.limits", "models", "ops"}) | GROUND | OWN_FILES,
    "ipc": frozenset({"core.plan"}) | GROUND,
    "group": GROUND | OWN_FILES,
    "peers": frozenset({"group"}) | GROUND,
    "page_folder": GROUND | OWN_FILES,
    "engine": frozenset({"core", "ipc", "peers", "page_folder"}) | GROUND,
    "engine.building": frozenset({"engine", "core", "executor", "models", "ops", "group", "peers", "page_folder"})
    | BELOW_SERVER,
    "server": BELOW_SERVER,
    "server.observe": SERVER,
    "server.service": SERVICE,
    **dict.fromkeys(HTTP_BASE, APIS),
    "server.api": APIS,
    "server.api.reasoning": APIS | {"server.api", "server.api.openai"},
    "server.api.chat": APIS | {"server.api", "server.api.openai"},  # OpenAI's chat request is that of all APIs
    "server.api.openai": APIS | {f"server.api.{name}" for name in SHARED},
    "server.api.anthropic": APIS | {f"server.api.{name}" for name in (*SHARED, "openai.requests", "openai.tools")},
    "server.api.responses": APIS | {f"server.api.{name}" for name in (*SHARED, "openai")},
    "server.api.tgi": APIS | {"server.api"},
    "server.http": HTTP,
    "server.processes": HTTP
    | {
        "server.http",
        "engine",
        "engine.building",
        "group",
        "peers",
        "page_folder",
    },
    "llm": BELOW_SERVER | {"engine"},
}
IN_QUIRE_ITSELF = frozenset({"", "__version__", "__file__"})
TOP = frozenset({"cli", "ray", "__init__", "__main__"})  # may import everything
STANDARD_ONLY = GROUND | {"core"}  # these import nothing but the standard library and what is allowed above
NEVER: dict[str, frozenset[str]] = {
    "core": frozenset({"threading", "time"}),  # a clock is an argument
    **dict.fromkeys(
        ("files", "text", "grammar", "ipc", "group", "peers", "page_folder", "engine", "server", "llm"),
        frozenset({"jax", "jaxlib"}),
    ),
    "engine.building": frozenset(),  # it puts the parts together, devices included
}


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in a module of `package`, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quire":
            yield (
                node.lineno,
                f"quire.{node.attr}",
            )  # `import quire` gives nothing; what is taken from it is imported then
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # `from quire import core` imports a module; `from quire.core.plan import Chunk` a name in one.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def prefixes(name: str) -> list[str]:
    """a.b.c, a.b and a of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def room_of(module: str) -> str:
    return next((prefix for prefix in prefixes(module) if prefix in MAY_IMPORT), "")


def faults(module: str, source: str, package: str) -> list[str]:
    """`module` is its name below quire, as in `core.plan`; its package as Python knows it, as in `quire.core`."""
    part = module.split(".", maxsplit=1)[0]
    if part in TOP:
        return []
    room = room_of(module)
    if not room:
        return [f"{module}: this part is not in the layering; say in tests/test_layering.py what it may import"]
    found = []
    for line, name in imports(source, package):
        top, _, below = name.partition(".")
        if top == "quire":
            known = room_of(below) == room or not MAY_IMPORT[room].isdisjoint(prefixes(below))
            wrong = not known and below not in IN_QUIRE_ITSELF
        else:
            wrong = top in NEVER.get(room, NEVER.get(part, frozenset())) or (
                part in STANDARD_ONLY and top not in sys.stdlib_module_names
            )
        if wrong:
            found.append(f"{line}: {module} may not import {name}")
    return found


def test_every_import_points_downward():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).with_suffix("")
        names = inside.parts[:-1] if inside.name == "__init__" and len(inside.parts) > 1 else inside.parts
        package = ".".join(("quire", *inside.parts[:-1]))
        found += [f"{path}:{fault}" for fault in faults(".".join(names), path.read_text(), package)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors", "import msgspec"),
        ("request", "from quire.core.plan import Chunk"),
        ("core.scheduler", "import numpy as np"),
        ("core.scheduler", "import time"),
        ("core.scheduler", "def f():\n    from time import monotonic"),
        ("core.scheduler", "from quire.engine.engine import Engine"),
        ("core.scheduler", "from quire import resolve"),
        ("core.scheduler", "from ..engine import engine"),
        ("core.scheduler", "from .. import engine"),
        ("files.gguf", "import jax"),
        ("files.gguf", "from quire.text.tokenizer import Tokenizer"),
        ("text.chat", "import jax.numpy"),
        ("text.tools", "from quire.grammar.matcher import JSON_STYLE"),
        ("ops.attention", "from quire.models.families.llama import Llama"),
        ("models.llama", "from quire.core.plan import Chunk"),
        ("executor.executor", "from quire.core.scheduler import Scheduler"),
        ("ipc.journal", "from quire.engine.fault_isolation import FaultIsolation"),
        ("executor.executor", "from quire.engine.executor import Executor"),
        ("engine.engine", "from quire.executor.executor import DeviceExecutor"),
        ("engine.driver", "from jax import numpy"),
        ("server.api.openai", "from quire.core.plan import Update"),
        ("server.api.openai", "import quire.executor"),
        ("server.observe.metrics", "from quire.server.service.stream import Stream"),
        ("server.service.service", "from quire.engine.engine import Engine"),
        ("server.service.stream", "from quire.server.api.tgi import strict"),
        ("server.api.openai.chat", "from quire.server.api.tgi import strict"),
        ("server.api.openai.chat", "from quire.server.api.responses.items import message"),
        ("server.api.responses.encoder", "from quire.server.api.anthropic.blocks import added_up"),
        ("server.api.anthropic.encoder", "from quire.server.api.openai.chat_encoder import ChatEncoder"),
        ("server.rate_limits", "from quire.server.service.service import Service"),
        ("server.api.job", "from quire.server.api.openai.errors import error_body"),
        ("server.service.stream", "from quire.server.http.sse import EventStream"),
        ("server.api.tgi.generate", "from quire.server.http.app import App"),
        ("server.http.sse", "from quire.server.api.dialect import TGI"),
        ("server.http.app", "from quire.server.processes.serve import serve"),
        ("server.settings", "from quire.server.service.service import Service"),
        ("llm", "from quire.models.registry import families"),
        ("executor.programs", "import quire\nllm = quire.LLM"),
        ("something_new", ""),
    ],
)
def test_an_import_that_points_upward_is_found(module, line):
    package = ".".join(("quire", *module.split(".")[:-1]))
    assert faults(module, line, package)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.scheduler", "from quire.core.plan import Chunk\nfrom quire.request import Request\nimport heapq"),
        ("core.scheduler", "from .plan import Chunk"),
        ("executor.batch", "from quire.core.plan import Chunk\nfrom quire import request"),
        ("engine.building.build", "import jax\nfrom quire.executor.executor import DeviceExecutor"),
        ("server.api.openai", "from quire.ipc.messages import Submit\nfrom quire import __version__"),
        ("server.api.openai.chat", "from quire.server.http.sse import EventStream"),
        ("server.http.app", "from quire.server.api.tgi.dialect import TGI"),
        ("executor.programs", "import quire\nroot = quire.__file__"),
        ("cli", "import jax"),
    ],
)
def test_an_import_that_points_downward_is_not(module, line):
    package = ".".join(("quire", *module.split(".")[:-1]))
    assert faults(module, line, package) == []


def module_imports(path: Path) -> set[str]:
    """The modules of quire that a file imports as it is loaded, or for its types; not inside functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    package = ".".join(("quire", *path.relative_to(PACKAGE).parts[:-1]))
    names = [name for _, name in imports(ast.unparse(tree), package)]
    found = {next((prefix for prefix in prefixes(name) if module_file(prefix)), "") for name in names}
    return found - {"", "quire"}  # the package itself, which every module is in, gives a version and a place


def module_file(name: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; none where no such ring is."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for imported in sorted(graph.get(name, ())):
                if found := visit(imported, [*above, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_modules_import_each_other():
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = module_imports(path) - {name}
    assert "quire.server.service.service" in graph["quire.server.http.route"]
    assert circle(graph) == []


def test_a_ring_of_imports_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def loaded_by(code: str) -> set[str]:
    """The modules a fresh interpreter has after `code`."""
    report = "\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split("MODULES", 1)[1].split())


def test_the_core_needs_the_standard_library_alone():
    modules = loaded_by("import quire.core, pkgutil, importlib\n" + IMPORT_ALL.format(part="core"))
    assert "quire.core.scheduler" in modules
    assert not modules & {"jax", "jaxlib", "numpy", "msgspec"}


@pytest.mark.parametrize("module", ["quire.engine.driver", "quire.text", "quire.files"])
def test_what_front_ends_load_leaves_jax_alone(module):
    modules = loaded_by(f"import {module}")
    assert module in modules
    assert not modules & {"jax", "jaxlib"}


def test_help_is_answered_without_loading_jax_or_numpy():
    code = "import sys\nfrom typer.testing import CliRunner\nfrom quire.cli import make_app\n"
    code += "answer = CliRunner().invoke(make_app(), ['--help'])\nprint(answer.output)\nassert answer.exit_code == 0\n"
    code += "assert 'serve' in answer.output"
    assert not loaded_by(code) & {"jax", "jaxlib", "numpy"}


def test_the_command_answers_help():
    done = subprocess.run([sys.executable, "-m", "quire", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout


IMPORT_ALL = """
for found in pkgutil.iter_modules(quire.{part}.__path__):
    importlib.import_module("quire.{part}." + found.name)
"""
