"""Prometheus' text format.

Written by hand: counters keep names without `_total`, which dashboards made for text-generation-inference read and the
client library does not write.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts by bucket. Observing costs a bisection, since it happens for every token."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], counts: list[int] | None = None, sum: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = counts or [0] * (len(bounds) + 1)
        self.sum = sum

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Exposition:
    """A text of metrics in the making. With a `label`, values are a mapping by the label's values."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, help: str, value: float | Mapping[str, float], label: str = "") -> None:
        self.family("counter", name, help, _by_label(value, label))

    def gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self.family("gauge", name, help, [(labels or {}, value)])

    def histogram(self, name: str, help: str, value: Histogram | Mapping[str, Histogram], label: str = "") -> None:
        self.family("histogram", name, help, _by_label(value, label))

    def family(
        self, kind: str, name: str, help: str, values: Iterable[tuple[Mapping[str, str], float | Histogram]]
    ) -> None:
        """All values of one name, each with its labels."""
        self._lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        for labels, value in values:
            written = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
            if isinstance(value, Histogram):
                self._buckets(name, written, value)
            else:
                self._lines.append(f"{name}{{{written}}} {value}" if written else f"{name} {value}")

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _buckets(self, name: str, labels: str, histogram: Histogram) -> None:
        total = 0
        before = f"{labels}," if labels else ""
        bounds = [*(f"{bound:.6g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            self._lines.append(f'{name}_bucket{{{before}le="{bound}"}} {total}')
        braces = f"{{{labels}}}" if labels else ""
        self._lines += [f"{name}_sum{braces} {histogram.sum}", f"{name}_count{braces} {total}"]


def escaped(text: str) -> str:
    """`text` escaped for the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _by_label(value: T | Mapping[str, T], label: str) -> list[tuple[dict[str, str], T]]:
    return [({label: key}, one) for key, one in value.items()] if isinstance(value, Mapping) else [({}, value)]
