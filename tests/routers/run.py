"""`make test-routers`: installs each router in an environment of its own, and tests two servers behind it."""

import os
import subprocess
import sys

from tests.routers.fleet import ROOT, ROUTERS, install


def main() -> int:
    for router in ROUTERS:
        install(router)
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/routers", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"QUIRE_ROUTERS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
