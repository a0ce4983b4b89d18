"""Results of a bench: as a file, as a table, and side by side."""

import json
from pathlib import Path
from typing import Any

from quire.errors import InvalidSetting
from quire.files.regular_file import read_regular_text

MAX_RESULTS_BYTES = 256 << 20

Results = dict[str, dict[str, float]]  # by case, by metric


def table(results: Results) -> str:
    lines = [f"{'case':<28} {'metric':<22} {'value':>12}"]
    for case, metrics in results.items():
        lines += [f"{case:<28} {metric:<22} {_number(value):>12}" for metric, value in metrics.items()]
    return "\n".join(lines)


def comparison(first: Results, second: Results) -> str:
    """Metrics that both have. The ratio is above 1 where the second is better."""
    lines = [f"{'case':<28} {'metric':<22} {'first':>12} {'second':>12} {'better by':>10}"]
    for case, metrics in first.items():
        for metric, value in metrics.items():
            other = second.get(case, {}).get(metric)
            if other is None:
                continue
            better, worse = (other, value) if metric.endswith("_per_s") else (value, other)
            ratio = f"{better / worse:.2f}x" if worse else "-"
            lines.append(f"{case:<28} {metric:<22} {_number(value):>12} {_number(other):>12} {ratio:>10}")
    for name, one, another in (("first", first, second), ("second", second, first)):
        missing = [case for case in one if case not in another]
        if missing:
            lines.append(f"only in the {name}: {', '.join(missing)}")
    return "\n".join(lines)


def read_results(file: Path) -> dict[str, Any]:
    """A file that the bench wrote."""
    try:
        found = json.loads(read_regular_text(file, MAX_RESULTS_BYTES))
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("results"), dict):
        raise InvalidSetting(f"{file} was not written by `quire bench`: it has no results")
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
