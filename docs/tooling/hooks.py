"""Puts the documents of the repository's root into the site, since mkdocs reads docs/ only."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_seen_from_site((ROOT / source).read_text(encoding="utf-8"))))
    return files


def _seen_from_site(text: str) -> str:
    """Links that are relative to the root, as seen from a page one folder below docs/."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"](../{page}")
    return text.replace("](docs/", "](../")
