"""Files, tests and names that documents mention exist, so that a reader who follows them arrives."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

MENTION = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|cc|h|md|toml|yaml|yml|json|svg|html)")
TEST = re.compile(r"test_\w+")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\(.*\))?")
# Files of models, adapters and other programs, and examples of files that a user writes.
NOT_OURS = re.compile(
    r"(.*/)?(config|generation_config|tokenizer|tokenizer_config|adapter_config|special_tokens_map|quire|keys|prometheus)"
    r"\.(json|toml|yaml|yml)|(.*/)?[A-Z_]+\.(gguf|json)|/.*|extra-openai-models\.yaml|socket-server\.cc"
)
SKIPPED = ("CHANGELOG.md", "docs/notes/")  # they speak of files as they were
CODE = ("quire", "tests", "bench", "examples", "docs/tooling")


def mentions(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(MENTION.findall(text))


@cache
def code() -> str:
    files = [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(re.findall(r"^\s*(?:async )?def (test_\w+)", code(), re.MULTILINE))


@cache
def files() -> tuple[str, ...]:
    folders = [ROOT / name for name in (*CODE, "docs", "deploy", ".github") if (ROOT / name).exists()]
    found = [*ROOT.iterdir(), *(file for folder in folders for file in folder.rglob("*"))]
    return tuple(f"/{file.relative_to(ROOT).as_posix()}" for file in found if file.is_file())


def exists(name: str) -> bool:
    """Documents leave out folders that are clear: `driver.py` after `quire/engine/engine.py`."""
    return any(file.endswith(f"/{name}") for file in files())


def pages() -> list[Path]:
    return [page for page in PAGES if not str(page.relative_to(ROOT)).startswith(SKIPPED)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    missing = set()
    for mention in mentions(page):
        name, _, test = mention.partition("::")
        if FILE.fullmatch(name) and not NOT_OURS.fullmatch(name) and not exists(name):
            missing.add(name)
        if TEST.fullmatch(test or name) and (test or name) not in names_of_tests():
            missing.add(mention)
    assert missing == set()


def test_the_names_that_contributing_mentions_are_in_the_code() -> None:
    """The ten-minute tour, and the examples of how to add a model, a kernel, a route and a metric."""
    names = {mention for mention in mentions(ROOT / "CONTRIBUTING.md") if NAME.fullmatch(mention)}
    assert {name for name in names if name.partition("(")[0].rpartition(".")[2] not in code()} == set()


def test_the_numbers_that_the_readme_compares_are_those_of_the_performance_page() -> None:
    rows = re.findall(r"^\| (?:H200|CPU), [^\n]*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = [re.sub(r"\]\([^)]*\)", "]", row.split("|", 2)[2]) for row in rows]
    numbers = {number for row in cells for number in re.findall(r"\d[\d,.]*\d", row)} - {"8_0"}
    assert len(rows) >= 5
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert {number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", page)} == set()


def test_a_name_that_does_not_exist_is_found_out() -> None:
    assert not exists("quire/core/nothing.py")
    assert "test_nothing_of_the_kind" not in names_of_tests()
