"""No function and no file of the package is too long to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import quire

PACKAGE = Path(quire.__file__).parent
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_FILE = 350


def long_functions(source: str, most: int = MOST_LINES_OF_A_FUNCTION) -> Iterator[tuple[str, int]]:
    """Names and lines of those with more than `most` lines, nested ones and methods included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > most:
                yield node.name, num_lines


def test_no_function_is_long() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    found = [(str(path.relative_to(PACKAGE)), *one) for path, text in sources.items() for one in long_functions(text)]
    assert found == []


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(PACKAGE.rglob("*.py"))}
    found = {str(path.relative_to(PACKAGE)): lines for path, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE}
    assert found == {}


def test_a_long_function_is_found() -> None:
    source = "class A:\n    async def f(self):\n        x = 1\n        return x\n\ndef g():\n    pass\n"
    assert list(long_functions(source, most=2)) == [("f", 3)]
