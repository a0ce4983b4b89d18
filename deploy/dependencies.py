"""The packages that Quire needs, one a line, for a layer of an image that does not change with the code.

python3 deploy/dependencies.py [EXTRAS]        EXTRAS as in pip's quire[cuda,otel]: cuda,otel
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def dependencies(pyproject: str, extras: str) -> Iterator[str]:
    """Those to build with as well, since the package is built without an environment of its own."""
    read = tomllib.loads(pyproject)
    yield from read["build-system"]["requires"]
    yield from read["project"]["dependencies"]
    known = read["project"]["optional-dependencies"]
    for extra in filter(None, extras.split(",")):
        if extra not in known:
            raise SystemExit(f"EXTRAS has {extra!r}; there are {', '.join(known)}")
        yield from known[extra]


if __name__ == "__main__":
    print("\n".join(dependencies(Path("pyproject.toml").read_text(encoding="utf-8"), "".join(sys.argv[1:2]))))
