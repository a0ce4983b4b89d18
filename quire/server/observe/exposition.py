"""Prometheus' text format.

Written by hand: counters keep names without `_total`, which dashboards made for text-generation-inference read and the
client library does not write.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

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
        self._numbers("counter", name, help, value, label)

    def gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        if labels is None:
            self._numbers("gauge", name, help, value)
            return
        self._family("gauge", name, help)
        written = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{written}}} {value}")

    def histogram(self, name: str, help: str, value: Histogram | Mapping[str, Histogram], label: str = "") -> None:
        self._family("histogram", name, help)
        for key, histogram in value.items() if isinstance(value, Mapping) else (("", value),):
            labels = f'{label}="{key}"' if label else ""
            self._buckets(name, labels, histogram)

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _family(self, kind: str, name: str, help: str) -> None:
        self._lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]

    def _numbers(self, kind: str, name: str, help: str, value: float | Mapping[str, float], label: str = "") -> None:
        self._family(kind, name, help)
        if isinstance(value, Mapping):
            self._lines += [f'{name}{{{label}="{escaped(key)}"}} {number}' for key, number in value.items()]
        else:
            self._lines.append(f"{name} {value}")

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
    """As the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
