"""Crosses one set of capabilities: `python -m tests.crossings --seed 7 "few pages" "longrope" "forced tokens"`."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crossings.covering import with_needs
from tests.crossings.runs import MakeBench, run_set
from tests.crossings.table import TABLE

BENCHES = ("fake", "models")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(TABLE), metavar="NAME", help="of a capability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on")
    parser.add_argument("--bench", choices=BENCHES, default="fake")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, benches(given.bench, Path(folder)) as make:
        for seed in range(given.seed, given.seed + given.seeds):
            crossing, error = run_set(make, with_needs(given.names), seed)
            print(f"seed {seed}: {dict(crossing.happened)}")
            if error is not None:
                raise error


@contextmanager
def benches(name: str, folder: Path) -> Iterator[MakeBench]:
    if name == "fake":
        from tests.crossings.fake_bench import FakeBench

        yield lambda: FakeBench(folder)
        return
    from tests.compiling import flags
    from tests.shared_programs import FOLDER

    os.environ.setdefault(FOLDER, str(folder))
    os.environ["XLA_FLAGS"] = flags(os.environ.get("XLA_FLAGS", ""))  # JAX reads it when it is first used
    from tests.crossings.model_bench import ModelBench, Models

    models = Models(folder)
    yield lambda: ModelBench(models)
    models.close()


if __name__ == "__main__":
    main()
