"""Names, docstrings and comments in plain words: what can be said exactly about them.

The subject comes first, programs are not people, and a class name means one thing.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))

# A docstring that opens so leaves its subject out: "What a step may hold".
BARE = re.compile(r"(What|How|Who|Whose|Whom|Why|Which|Whether|Whoever|Whatever)\b|(Where|When)\b[^,]*$", re.MULTILINE)
# So does a module that opens so: "Of the adapters of rows".
BARE_IN_MODULE = re.compile(r"(Where|When|That|Such|Of|So)\b")
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody|everybody|anyone|everyone|someone)\b", re.IGNORECASE)
WHOSE = re.compile(r"\bwhose\b", re.IGNORECASE)
# Arrays have axes and sequences have tokens; in these folders a program or a client would be meant.
PROGRAMS = ("server", "cli", "ipc", "group", "peers", "llm")

# Names that were replaced by the field's own words. They do not come back.
REPLACED = {
    "Room": "StepBudget",
    "Pace": "Bursts",
    "Appointments": "RetryReservations",
    "Guides": "GrammarMasks",
    "Leash": "SupervisorLink",
    "Pulse": "Heartbeat",
    "Word": "ControlMessage",
    "keep_what_is_there": "freeze_gc",
    "Places": "KVWriteTargets",
    "summed": "num_contracted, or sum_stats",
    "liking": "router_logits",
    "Asked": "RequestResult",
    "Asking": "GenerationSpec",
    "Ask": "PrefillRequest",
    "Turnstile": "EngineStepper",
    "Understood": "ParsedRequest",
    "is_told": "tools_in_system_prompt",
    "is_beyond_help": "is_permanently_down",
}

# Class names that stand in two modules, and why that is one idea.
SHARED_NAMES = {
    **dict.fromkeys(("Pending", "Grammars", "Port", "Prefill", "Dialect"), "an interface and what implements it"),
    **dict.fromkeys(("Completion", "Reasoning", "TokenSpan", "Ping"), "the same thing in an API's own words"),
    **dict.fromkeys(("State", "Arrival", "Computed", "Parts", "Tiling"), "folders apart"),
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def place(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"


def test_no_docstring_opens_with_a_bare_clause() -> None:
    assert [place(path, *found) for path in FILES for found in docstrings(path) if BARE.match(found[1])] == []
    openings = [(path, ast.get_docstring(tree(path)) or "") for path in [*FILES, *TESTS]]
    assert [str(path) for path, text in openings if BARE.match(text) or BARE_IN_MODULE.match(text)] == []


def test_programs_are_not_called_persons() -> None:
    found = []
    for path in FILES:
        of_programs = path.relative_to(PACKAGE).parts[0] in PROGRAMS
        for line, text in [*docstrings(path), *comments(path)]:
            if PERSONS.search(text) or (of_programs and WHOSE.search(text)):
                found.append(place(path, line, text))
    assert found == []


def test_tests_are_named_in_the_same_way() -> None:
    found = [(path.name, name) for path in TESTS for _, name in names(path) if name.startswith("test_")]
    assert [one for one in found if PERSONS.search(one[1].replace("_", " "))] == []


def test_replaced_names_do_not_come_back() -> None:
    assert [place(path, *found) for path in FILES for found in names(path) if found[1] in REPLACED] == []


def test_a_class_name_means_one_thing() -> None:
    modules = defaultdict(list)
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in modules.items() if len(where) > 1 and name not in SHARED_NAMES} == {}


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [
        ("What a step may hold.", True),
        ("Where it is kept.", True),
        ("Where there are few, all of them.", False),
        ("The adapters of rows.", False),
        ("Sockets that share a port.", False),
    ],
)
def test_a_bare_clause_is_recognised(text: str, is_bare: bool) -> None:
    assert bool(BARE.match(text)) == is_bare
