"""Who may import whom. A fault is reported as file, line and import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
GROUND = frozenset({"retry_reservations", "cache_folder", "errors", "request", "config", "resolve"})

# What each part of quire may import of quire. A name with a dot is one module of a part.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "retry_reservations": GROUND,
    "cache_folder": GROUND,
    "errors": GROUND,
    "request": GROUND,
    "config": GROUND,
    "resolve": GROUND,
    "core": frozenset({"retry_reservations", "errors", "request"}),
    "files": frozenset({"cache_folder", "errors"}),
    "text": frozenset({"errors", "request", "files", "grammar"}),
    "grammar": frozenset({"errors", "request", "text"}),
    "sharding": GROUND,
    "ops": frozenset({"sharding"}) | GROUND,
    "models": frozenset({"ops", "sharding", "files"}) | GROUND,
    "executor": frozenset({"core.plan", "core.limits", "models", "ops", "sharding"}) | GROUND,
    "ipc": frozenset({"core.plan"}) | GROUND,
    "engine": frozenset({"core", "ipc"}) | GROUND,
    "engine.build": frozenset({"core", "ipc", "executor", "models", "ops", "sharding", "files", "text", "grammar"})
    | GROUND,
    "server": frozenset({"engine", "ipc", "text", "grammar", "files"}) | GROUND,
    "llm": frozenset({"engine", "ipc", "text", "grammar", "files"}) | GROUND,
}
IN_QUIRE_ITSELF = frozenset({"", "__version__", "__file__"})
TOP = frozenset({"cli", "__init__", "__main__"})  # may import everything
STANDARD_ONLY = GROUND | {"core"}  # these import nothing but the standard library and what is allowed above
NEVER: dict[str, frozenset[str]] = {
    "core": frozenset({"threading", "time"}),  # a clock is an argument
    **dict.fromkeys(("files", "text", "grammar", "ipc", "engine", "server", "llm"), frozenset({"jax", "jaxlib"})),
    "engine.build": frozenset(),  # it puts the parts together, devices included
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


def faults(module: str, source: str, package: str) -> list[str]:
    """`module` is its name below quire, as in `core.plan`; its package as Python knows it, as in `quire.core`."""
    part = module.split(".", maxsplit=1)[0]
    if part in TOP:
        return []
    allowed = MAY_IMPORT.get(module, MAY_IMPORT.get(part))
    if allowed is None:
        return [f"{module}: this part is not in the layering; say in tests/test_layering.py what it may import"]
    found = []
    for line, name in imports(source, package):
        top, _, below = name.partition(".")
        if top == "quire":
            inside = below.split(".")[0] == part
            known = any(below == one or below.startswith(f"{one}.") for one in allowed)
            wrong = not (inside or known or below in IN_QUIRE_ITSELF)
        else:
            wrong = top in NEVER.get(module, NEVER.get(part, frozenset())) or (
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
        ("ops.attention", "from quire.models.llama import Llama"),
        ("models.llama", "from quire.core.plan import Chunk"),
        ("executor.executor", "from quire.core.scheduler import Scheduler"),
        ("ipc.journal", "from quire.engine.fault_isolation import FaultIsolation"),
        ("executor.executor", "from quire.engine.executor import Executor"),
        ("engine.engine", "from quire.executor.executor import DeviceExecutor"),
        ("engine.driver", "from jax import numpy"),
        ("server.openai", "from quire.core.plan import Update"),
        ("server.openai", "import quire.executor"),
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
        ("executor.batch", "from quire.core.plan import Chunk\nfrom quire import sharding"),
        ("engine.build", "import jax\nfrom quire.executor.executor import DeviceExecutor"),
        ("server.openai", "from quire.ipc.messages import Submit\nfrom quire import __version__"),
        ("executor.programs", "import quire\nroot = quire.__file__"),
        ("cli", "import jax"),
    ],
)
def test_an_import_that_points_downward_is_not(module, line):
    package = ".".join(("quire", *module.split(".")[:-1]))
    assert faults(module, line, package) == []


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
    code = "import sys\nfrom typer.testing import CliRunner\nfrom quire.cli import app\n"
    code += "answer = CliRunner().invoke(app, ['--help'])\nprint(answer.output)\nassert answer.exit_code == 0\n"
    code += "assert 'serve' in answer.output"
    assert not loaded_by(code) & {"jax", "jaxlib", "numpy"}


def test_the_command_answers_help():
    done = subprocess.run([sys.executable, "-m", "quire", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout


IMPORT_ALL = """
for found in pkgutil.iter_modules(quire.{part}.__path__):
    importlib.import_module("quire.{part}." + found.name)
"""
