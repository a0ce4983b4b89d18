"""A tag is released only if it is the version of the package and the changelog has a section for it.

python3 .github/check_version.py v0.2.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problem(tag: str) -> str | None:
    """Why this tag cannot be released."""
    stated = re.search(
        r'^__version__ = "([^"]+)"', (ROOT / "quire/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    version = stated.group(1) if stated else "none"
    if tag != f"v{version}":
        return f"the tag is {tag}, and quire/__init__.py says {version}: it must be v{version}"
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        return f"CHANGELOG.md has no section '## {version}'"
    return None


if __name__ == "__main__":
    sys.exit(problem(sys.argv[1]))
