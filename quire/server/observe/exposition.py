"""Prometheus' text form.

Written by hand because counters must keep names that do not end in `_total`, which dashboards made for
text-generation-inference read and the client library does not write.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts by bucket. Observing costs a bisection, since it happens for every token."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class Exposition:
    """A page of metrics being written."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, help: str, value: float) -> None:
        self._family(name, help, "counter")
        self._lines.append(f"{name} {_number(value)}")

    def counters(self, name: str, help: str, label: str, values: Mapping[str, float]) -> None:
        self._family(name, help, "counter")
        self._lines += [f'{name}{{{label}="{key}"}} {_number(value)}' for key, value in values.items()]

    def gauge(self, name: str, help: str, value: float) -> None:
        self._family(name, help, "gauge")
        self._lines.append(f"{name} {_number(value)}")

    def histogram(self, name: str, help: str, histogram: Histogram) -> None:
        self._family(name, help, "histogram")
        self._buckets(name, "", histogram)

    def histograms(self, name: str, help: str, label: str, values: Mapping[str, Histogram]) -> None:
        self._family(name, help, "histogram")
        for key, histogram in values.items():
            self._buckets(name, f'{label}="{key}"', histogram)

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _family(self, name: str, help: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]

    def _buckets(self, name: str, labels: str, histogram: Histogram) -> None:
        total = 0
        before = f"{labels}," if labels else ""
        bounds = [*(f"{bound:.6g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            self._lines.append(f'{name}_bucket{{{before}le="{bound}"}} {total}')
        braces = f"{{{labels}}}" if labels else ""
        self._lines += [f"{name}_sum{braces} {_number(histogram.sum)}", f"{name}_count{braces} {total}"]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value)
