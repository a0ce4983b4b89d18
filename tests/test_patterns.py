"""No pattern of the package takes more than linear time."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import quire
from quire.cli import settings
from quire.files import hub
from quire.grammar import gbnf, lark_text, regex_size
from tests.backtracking import faults

ROOT = Path(quire.__file__).parent
ANCHORED = {"match", "fullmatch"}
FUNCTIONS = ANCHORED | {"compile", "search", "sub", "subn", "findall", "finditer", "split"}

OF_WORDS = "it has no repetition: words, one of which is looked for"
OF_CHECKPOINTS = "a checkpoint's own, over the names of its modules; groups that repeat are refused where it is read"
# Patterns that are refused or made at run time, and why they may stay. By module and as they are written.
EXCEPTIONS = {
    ("quire.cli.settings", repr(settings._OF_SERVICE.pattern)): "of the names of variables in the environment",
    ("quire.files.hub", repr(hub._REPOSITORY.pattern)): "what an operator names; `.gguf` is followed by `@` or the end",
    ("quire.files.peft", "f'(.*\\\\.)?({key})'"): "an adapter's own, over names of modules",
    ("quire.grammar.gbnf", repr(gbnf._TOKEN.pattern)): "what does not match ends the reading; blanks are a token",
    ("quire.grammar.lark_text", repr(lark_text._TOKEN.pattern)): "what is not closed ends the reading",
    ("quire.grammar.regex_size", repr(regex_size._NAMED.pattern)): "of at most 64 characters",
    ("quire.models.formats.compressed_tensors", "pattern"): OF_CHECKPOINTS,
    ("quire.models.formats.modelopt", "translate(text)"): OF_CHECKPOINTS,
    ("quire.models.formats.patterns", "text"): OF_CHECKPOINTS,
    ("quire.server.http.route", "pattern"): "of our routes; a name with slashes is followed by a word that is fixed",
    ("quire.text.call_parser", "'|'.join(map(re.escape, form.first_marks)) or '(?!)'"): OF_WORDS,
    ("quire.text.call_parser", "'|'.join({re.escape(mark[0]) for mark in form.first_marks}) or '(?!)'"): OF_WORDS,
    ("quire.text.shield", "_alternatives(self.specials)"): OF_WORDS,
    ("quire.text.shield", "f'{mark}|\\\\\\\\u{ord(mark):04x}'"): OF_WORDS,
    ("quire.text.shield", "f'[{chr(STAND_INS)}-{chr(STAND_INS + len(self.specials))}]'"): "it is one character",
}


class Use(NamedTuple):
    """A call of `re`."""

    module: str
    written: str  # the pattern, as it is in the source
    pattern: str | None  # its value; None where that is made at run time
    flags: int
    is_anchored: bool  # it is tried at one place of a text


def uses() -> list[Use]:
    trees = {_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    methods = {module: _methods(tree) for module, tree in trees.items()}
    everywhere: dict[str, set[str]] = {}  # the methods of a name that modules share
    for known in methods.values():
        for name, its_methods in known.items():
            everywhere.setdefault(name, set()).update(its_methods)
    return [
        use
        for module, tree in trees.items()
        for use in _uses(module, tree, {**everywhere, **{k: v for k, v in methods[module].items() if k[0] == "_"}})
    ]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


def _methods(tree: ast.Module) -> dict[str, set[str]]:
    """The methods that are called of each name; "search" stands for one that cannot be known, and for a match at a
    place that is given, as of the next token."""
    found: dict[str, set[str]] = {}
    parents = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            parent = parents[id(node)]
            call = parents.get(id(parent))
            is_anywhere = not isinstance(parent, ast.Attribute) or (isinstance(call, ast.Call) and len(call.args) > 1)
            found.setdefault(node.id, set()).add("search" if is_anywhere else parent.attr)
    return found


def _uses(module: str, tree: ast.Module, methods: dict[str, set[str]]) -> Iterator[Use]:
    names = {
        id(node.value): node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("re", "regex"), f"{module} imports names of re, which this does not follow"
        if isinstance(node, ast.Import):
            assert all(one.name != "regex" and not (one.name == "re" and one.asname) for one in node.names), module
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr in FUNCTIONS):
            continue
        how, pattern = node.func.attr, node.args[0]
        its_methods = methods.get(names.get(id(node), ""), {"search"}) if how == "compile" else {how}
        flags = next((one.value for one in node.keywords if one.arg == "flags"), None)
        if len(node.args) > 1 and how == "compile":
            flags = node.args[1]
        known = vars(importlib.import_module(module))
        number = 0 if flags is None else int(eval(ast.unparse(flags), known))
        yield Use(module, ast.unparse(pattern), _value(pattern, known), number, its_methods <= ANCHORED | {"pattern"})


def _value(pattern: ast.expr, known: dict[str, Any]) -> str | None:
    """The pattern, in which any one character stands for text that is escaped at run time."""

    class Stands(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            return ast.Constant("(?:.|\n)") if ast.unparse(node.func) == "re.escape" else node

    for written in (ast.unparse(pattern), ast.unparse(Stands().visit(pattern))):
        try:
            found = eval(written, known)
        except NameError:
            continue
        assert isinstance(found, str)
        return found
    return None


USES = uses()


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.module}: {use.written[:40]}")
def test_patterns_are_linear(use: Use) -> None:
    if (use.module, use.written) in EXCEPTIONS:
        return
    assert use.pattern is not None, f"{use.module}: {use.written} is made at run time"
    assert not faults(use.pattern, use.flags, is_anchored=use.is_anchored), f"{use.module}: {use.written}"


def test_no_exception_is_left_over() -> None:
    assert EXCEPTIONS.keys() <= {(use.module, use.written) for use in USES}
    for use in USES:
        if (use.module, use.written) in EXCEPTIONS and use.pattern is not None:
            assert faults(use.pattern, use.flags, is_anchored=use.is_anchored), f"{use.written} needs no exception"


LINEAR = [
    (r"\w+", False),
    (r"(a|b)*c", True),
    (r"\s*+x", True),
    (r"a*?b", True),
    (r'"(?:[^"\\]|\\[\s\S])*"', True),
    (r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", True),
    (r"(?:a?b)*c", True),
    (r"<[^<>]*>", False),
    (r".*x", True),
]
NOT_LINEAR = [
    (r"\s*(?:a)?\s*b", True),
    (r"(?:a|a)*b", True),
    (r"(a*)*", True),
    (r"(x+x+)+y", True),
    (r"(?:a?){30}a{30}", True),
    (r"(?:a?a)*c", True),
    (r"(a)\1", True),
    (r".*x.*y", True),
    (r".*x", False),
    (r"\s+$", False),
    (r"\s+x", False),
    (r'"(?:[^"\\]|\\[\s\S])*"', False),
    (r"\{[^{}]*:[^{}]*(?:\d{5,}|\{)", True),
    (r"(?i:K*)k\d*", True),
]


@pytest.mark.parametrize(("pattern", "is_anchored"), LINEAR)
def test_linear_patterns_pass(pattern: str, is_anchored: bool) -> None:
    assert faults(pattern, 0, is_anchored=is_anchored) == []


@pytest.mark.parametrize(("pattern", "is_anchored"), NOT_LINEAR)
def test_patterns_that_backtrack_are_found(pattern: str, is_anchored: bool) -> None:
    assert faults(pattern, 0, is_anchored=is_anchored)
