"""Links of the documents lead to files and headings that there are. `make docs` checks those of the site once more."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
IN_SITE = {  # documents of the root, which the site has under other names: docs/tooling/hooks.py
    "docs/project/contributing.md": "CONTRIBUTING.md",
    "docs/project/changelog.md": "CHANGELOG.md",
    "docs/project/security.md": "SECURITY.md",
    "docs/project/code-of-conduct.md": "CODE_OF_CONDUCT.md",
}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    text = without_code(path.read_text(encoding="utf-8"))
    named = set(re.findall(r'<a id="([^"]+)">', text))
    return named | {slug(heading) for heading in HEADING.findall(text)}


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())


def broken(page: Path, link: str) -> str | None:
    """Why a link leads nowhere."""
    if re.match(r"[a-z]+:", link):
        return None
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    known = IN_SITE.get(str(target.relative_to(ROOT)))
    target = ROOT / known if known else target
    if not target.exists():
        return f"{link}: there is no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{link}: there is no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(without_code(page.read_text(encoding="utf-8")))
    assert [why for link in links if (why := broken(page, link))] == []


def test_a_broken_link_is_found_out() -> None:
    readme = ROOT / "README.md"
    assert broken(readme, "docs/api.md#timings") is None
    assert broken(readme, "docs/nothing.md")
    assert broken(readme, "docs/api.md#nothing")
