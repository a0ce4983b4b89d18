"""What a load run showed, as numbers and as a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.cli.bench.serving_client import Asked
from quire.cli.bench.serving_load import Run

PERCENTS = (50, 90, 99)
Numbers = dict[str, float]


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def numbers(run: Run) -> Numbers:
    """By metric; latencies in milliseconds, of the requests that were answered. Empty ones are left out."""
    answered = [asked for asked in run.asked if asked.error is None]
    output_tokens = sum(asked.output_tokens for asked in answered)
    prompt_tokens = [asked.prompt_tokens for asked in answered if asked.prompt_tokens is not None]
    found: Numbers = {
        "requests": len(run.asked),
        "errors": len(run.asked) - len(answered),
        "short_answers": sum(asked.output_tokens < run.output_tokens for asked in answered),
        "seconds": run.took_s,
        "requests_per_s": len(answered) / run.took_s,
        "output_tokens_per_s": output_tokens / run.took_s,
        "client_cpu_share": run.client_cpu_s / run.took_s,
    }
    if prompt_tokens:
        found["total_tokens_per_s"] = (sum(prompt_tokens) + output_tokens) / run.took_s
        found["prompt_tokens"] = sum(prompt_tokens) / len(prompt_tokens)
    for name, values_s in latencies_s(answered).items():
        if values_s:
            found[f"{name}_ms_mean"] = sum(values_s) / len(values_s) * 1000
            found |= {f"{name}_ms_p{percent}": percentile(values_s, percent) * 1000 for percent in PERCENTS}
    return found


def latencies_s(answered: Sequence[Asked]) -> dict[str, list[float]]:
    """Of all requests: to the first token, between pieces, per token after the first, to the end."""
    return {
        "first_token": [asked.arrivals_s[0] - asked.sent_s for asked in answered],
        "inter_token": [
            later - earlier
            for asked in answered
            for earlier, later in zip(asked.arrivals_s, asked.arrivals_s[1:], strict=False)
        ],
        "per_token": [
            (asked.arrivals_s[-1] - asked.arrivals_s[0]) / (asked.output_tokens - 1)
            for asked in answered
            if asked.output_tokens > 1
        ],
        "end_to_end": [asked.ended_s - asked.sent_s for asked in answered],
    }


def errors(run: Run) -> dict[str, Any]:
    """How many of each kind, with what the first of the kind said."""
    kinds = Counter(asked.error for asked in run.asked if asked.error is not None)
    details = {asked.error: asked.detail for asked in reversed(run.asked) if asked.error is not None}
    return {kind: {"count": count, "first": details[kind]} for kind, count in kinds.items()}


def print_table(console: Console, results: dict[str, Numbers], faults: dict[str, dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("load", no_wrap=True)
    for column in ("requests", "tokens/s", "first token ms\np50 / p99", "inter-token ms\np50 / p99",
                   "end to end s\np50 / p99", "errors"):  # fmt: skip
        table.add_column(column, justify="right")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['requests']:.0f}",
            f"{found['output_tokens_per_s']:,.1f}",
            _pair(found, "first_token_ms", 1.0, 0),
            _pair(found, "inter_token_ms", 1.0, 1),
            _pair(found, "end_to_end_ms", 0.001, 2),
            f"[red]{found['errors']:.0f}[/red]" if found["errors"] else "0",
        )
    console.print(table)
    for name, found in results.items():
        if found["short_answers"]:
            console.print(f"{name}: {found['short_answers']:.0f} answers were shorter than asked for")
    for name, kinds in faults.items():
        for kind, fault in kinds.items():
            console.print(f"[red]{name}: {kind}, {fault['count']} times[/red] {fault['first'] or ''}", highlight=False)


def _pair(found: Numbers, name: str, factor: float, digits: int) -> str:
    if f"{name}_p50" not in found:
        return "-"
    return " / ".join(f"{found[f'{name}_p{percent}'] * factor:,.{digits}f}" for percent in (50, 99))
