"""The code blocks of the README and of docs/."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:^(?P<indent> *)<!-- not run: (?P<reason>[^>]+) -->\n)?^ *```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
DATA = {
    "",
    "text",
    "json",
    "toml",
    "yaml",
    "html",
    "mermaid",
    "promql",
}  # nothing to run; json, toml and yaml must parse


class Block(NamedTuple):
    page: str  # path below the root
    line: int
    language: str
    code: str
    reason: str  # why it is not run; empty for one that is

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of a shell: lines that are continued are joined, prompts and what is printed are left out."""
        text = re.sub(r"\\\n\s*", " ", self.code)
        lines = [line.strip() for line in text.splitlines()]
        if self.language == "console":
            text = "\n".join(self.code.splitlines())
            lines = [one.strip() for one in re.findall(r"^\$ (.*(?:\n {2,}.*)*)", text, re.MULTILINE)]
        return [line for line in lines if line and not line.startswith("#")]


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start("code"))
            code = re.sub(r"^ {0,4}", "", found["code"], flags=re.MULTILINE) if found["indent"] else found["code"]
            yield Block(str(path.relative_to(ROOT)), line, found["language"], code, found["reason"] or "")
