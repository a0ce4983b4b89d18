"""A plot of load runs as one SVG file: no library, no script, and it follows the viewer's light or dark theme."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 880, 640
PANEL_WIDTH, PANEL_HEIGHT = 350, 190
LEFT, TOP, ACROSS, DOWN = 64, 96, 430, 280  # of the first panel, and from one panel to the next
STYLE = """
  svg { color-scheme: light dark; --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --page: #ffffff;
        --c0: #2463b4; --c1: #c4641d; --c2: #1a7f5a; background: var(--page); }
  @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9198a1; --line: #343b44; --page: #0d1117;
        --c0: #6ea8fe; --c1: #f0a35e; --c2: #4cc38a; } }
  text { font: 12px system-ui, sans-serif; fill: var(--soft); }
  .title { font-size: 17px; font-weight: 600; fill: var(--ink); } .name { font-weight: 600; fill: var(--ink); }
  .axis { stroke: var(--line); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


class Curve(NamedTuple):
    name: str
    values: Sequence[float | None]  # by load


class Panel(NamedTuple):
    name: str
    unit: str
    curves: Sequence[Curve]


def panels(results: dict[str, dict[str, float]]) -> list[Panel]:
    def curve(name: str, metric: str, factor: float = 1.0) -> Curve:
        values = [found.get(metric) for found in results.values()]
        return Curve(name, [None if value is None else value * factor for value in values])

    def latency(name: str, metric: str, unit: str, factor: float) -> Panel:
        return Panel(name, unit, [curve(f"p{percent}", f"{metric}_ms_p{percent}", factor) for percent in (50, 90, 99)])

    return [
        Panel("Output", "tokens/s", [curve("", "output_tokens_per_s")]),
        latency("Time to first token", "first_token", "s", 0.001),
        latency("Between tokens", "inter_token", "ms", 1.0),
        latency("End to end", "end_to_end", "s", 0.001),
    ]


def plot(title: str, subtitle: str, results: dict[str, dict[str, float]]) -> str:
    loads = list(results)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="24" y="36">{escape(title)}</text><text x="24" y="58">{escape(subtitle)}</text>',
    ]
    for number, panel in enumerate(panels(results)):
        parts += _draw(panel, loads, LEFT + number % 2 * ACROSS, TOP + number // 2 * DOWN)
    return "\n".join([*parts, "</svg>", ""])


def _draw(panel: Panel, loads: Sequence[str], left: float, top: float) -> list[str]:
    bottom = top + PANEL_HEIGHT
    ticks = nice_ticks(max((value for curve in panel.curves for value in curve.values if value), default=1.0))
    parts = [f'<text class="name" x="{left}" y="{top - 14}">{escape(panel.name)}, {panel.unit}</text>']
    for tick in ticks:
        y = bottom - tick / ticks[-1] * PANEL_HEIGHT
        parts.append(f'<line class="axis" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    xs = [left + PANEL_WIDTH * (index + 0.5) / len(loads) for index in range(len(loads))]
    for x, load in zip(xs, loads, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(load)}</text>')
    for number, curve in enumerate(panel.curves):
        points = [
            (x, bottom - value / ticks[-1] * PANEL_HEIGHT, value)
            for x, value in zip(xs, curve.values, strict=True)
            if value is not None
        ]
        color = f"var(--c{number})"
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="curve" stroke="{color}" points="{line}"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{curve.name} {value:.4g} {panel.unit}'
            "</title></circle>"
            for x, y, value in points
        ]
        if curve.name:
            x = left + PANEL_WIDTH - 44 * (len(panel.curves) - number)
            parts.append(f'<circle cx="{x + 4}" cy="{top - 18}" r="4" fill="{color}"/>')
            parts.append(f'<text x="{x + 12}" y="{top - 14}">{curve.name}</text>')
        else:
            parts += [
                f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{value:,.4g}</text>' for x, y, value in points
            ]
    return parts


def nice_ticks(highest: float) -> list[float]:
    """Four to seven round ticks from 0 to at least `highest`."""
    rough = highest / 4
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    ticks = [0.0]
    while ticks[-1] < highest:
        ticks.append(round(ticks[-1] + step, 10))
    return ticks
