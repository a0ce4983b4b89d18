"""Crosses one set of capabilities: `python -m tests.crossings --seed 7 "few pages" "longrope" "forced tokens"`."""

import argparse
import tempfile
from pathlib import Path

from tests.crossings.covering import with_needs
from tests.crossings.runs import fake_benches, run_set
from tests.crossings.table import TABLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(TABLE), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on")
    parser.add_argument("--bench", choices=("fake",), default="fake")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seed, given.seed + given.seeds):
            crossing, error = run_set(fake_benches(Path(folder)), with_needs(given.names), seed)
            print(f"seed {seed}: {dict(crossing.happened)}")
            if error is not None:
                raise error


if __name__ == "__main__":
    main()
