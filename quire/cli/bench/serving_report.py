"""The results of a load run, as numbers and as a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from quire.cli.bench.serving_client import RequestResult
from quire.cli.bench.serving_load import LoadRun

PERCENTS = (50, 90, 99)
Numbers = dict[str, float]


class Goal(NamedTuple):
    """A request is good when it is answered, and its first token and its time per token are below these."""

    first_token_ms: float = 500.0
    per_token_ms: float = 25.0

    def is_met(self, result: RequestResult) -> bool:
        if result.error is not None or first_token_s(result) * 1000 >= self.first_token_ms:
            return False
        return result.output_tokens < 2 or per_token_s(result) * 1000 < self.per_token_ms


def first_token_s(result: RequestResult) -> float:
    return result.arrivals_s[0] - result.sent_s


def per_token_s(result: RequestResult) -> float:
    """Seconds per token after the first."""
    return (result.arrivals_s[-1] - result.arrivals_s[0]) / (result.output_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, by linear interpolation."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def numbers(run: LoadRun, goal: Goal) -> Numbers:
    """Numbers by metric; latencies in milliseconds, of the requests that were answered. Empty ones are left out."""
    answered = [result for result in run.results if result.error is None]
    output_tokens = sum(result.output_tokens for result in answered)
    prompt_tokens = [result.prompt_tokens for result in answered if result.prompt_tokens is not None]
    found: Numbers = {
        "requests": len(run.results),
        "errors": len(run.results) - len(answered),
        "short_answers": sum(result.output_tokens < result.wanted_tokens for result in answered),
        "seconds": run.took_s,
        "requests_per_s": len(answered) / run.took_s,
        "output_tokens_per_s": output_tokens / run.took_s,
        "client_cpu_share": run.client_cpu_s / run.took_s,
        "good_share": sum(map(goal.is_met, run.results)) / max(1, len(run.results)),
    }
    if prompt_tokens:
        found["total_tokens_per_s"] = (sum(prompt_tokens) + output_tokens) / run.took_s
        found["prompt_tokens"] = sum(prompt_tokens) / len(prompt_tokens)
    for name, values_s in latencies_s(answered).items():
        if values_s:
            found[f"{name}_ms_mean"] = sum(values_s) / len(values_s) * 1000
            found |= {f"{name}_ms_p{percent}": percentile(values_s, percent) * 1000 for percent in PERCENTS}
            found[f"{name}_ms_max"] = max(values_s) * 1000
    return found


def latencies_s(answered: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Times to the first token, pauses between pieces of an answer, times per token after the first, to the end."""
    return {
        "first_token": [first_token_s(result) for result in answered],
        "inter_token": [
            later - earlier
            for result in answered
            for earlier, later in zip(result.arrivals_s, result.arrivals_s[1:], strict=False)
        ],
        "per_token": [per_token_s(result) for result in answered if result.output_tokens > 1],
        "end_to_end": [result.ended_s - result.sent_s for result in answered],
    }


def errors(run: LoadRun) -> dict[str, Any]:
    """Errors by kind: their count, and the message of the first."""
    kinds = Counter(result.error for result in run.results if result.error is not None)
    details = {result.error: result.detail for result in reversed(run.results) if result.error is not None}
    return {kind: {"count": count, "first": details[kind]} for kind, count in kinds.items()}


def print_table(console: Console, results: dict[str, Numbers], faults: dict[str, dict[str, Any]], goal: Goal) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("load", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in results.items():
        table.add_row(name, *cells(found))
    console.print(table)
    console.print(
        f"Good: first token below {goal.first_token_ms:g} ms, below {goal.per_token_ms:g} ms per token after it.",
        highlight=False,
    )
    for name, found in results.items():
        if found["short_answers"]:
            console.print(f"{name}: {found['short_answers']:.0f} answers were shorter than asked for")
    for name, kinds in faults.items():
        for kind, fault in kinds.items():
            console.print(f"[red]{name}: {kind}, {fault['count']} times[/red] {fault['first'] or ''}", highlight=False)


COLUMNS = (
    "tokens/s", "first token\np50/p99 ms", "per token\np50/p99 ms", "pause\np50/p99/max ms", "good\nshare", "errors",
)  # fmt: skip


def cells(found: Numbers) -> list[str]:
    """One row, in the order of COLUMNS."""
    return [
        f"{found['output_tokens_per_s']:,.1f}",
        _joined(found, "first_token_ms", ("p50", "p99"), 0),
        _joined(found, "per_token_ms", ("p50", "p99"), 1),
        _joined(found, "inter_token_ms", ("p50", "p99", "max"), 1),
        f"{found['good_share']:.2f}",
        f"{found['errors']:.0f} of {found['requests']:.0f}",
    ]


def _joined(found: Numbers, name: str, kinds: tuple[str, ...], digits: int) -> str:
    if f"{name}_p50" not in found:
        return "-"
    return "/".join(f"{found[f'{name}_{kind}']:,.{digits}f}" for kind in kinds)
