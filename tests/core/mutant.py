"""One plausible fault in the source, and how it is put there."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    path: str  # below quire
    line: str  # stands exactly once in that file; with `within`, the first after it
    fault: str
    within: str = ""  # text that comes before it, exactly once in that file
    explanation: str = ""  # why it may survive: no behaviour differs


REACH = "reach.py"
POOL, CACHE, TREE, QUEUE = "core/page_pool.py", "core/prefix_cache.py", "core/prefix_tree.py", "core/queue.py"
RESERVATIONS = "retry_reservations.py"
RUNNING, SEQUENCE, REQUESTS = "core/running.py", "core/sequence.py", "core/requests.py"
PLANNER, COMPLETION, BUDGET = "core/planner.py", "core/completion.py", "core/step_budget.py"
SCHEDULER, LIMITS = "core/scheduler.py", "core/limits.py"
GUESSES, LOOKUP = "core/speculation.py", "core/lookup.py"
STEP_BUILDER, PROMPTS = "core/step_builder.py", "core/prompt_planner.py"
SNAPSHOTS, SAVES = "core/snapshots.py", "core/state_saves.py"
HEAP, DEADLINES = "core/lazy_heap.py", "core/deadlines.py"
ISOLATION, ENGINE, DRIVER = "engine/fault_isolation.py", "engine/engine.py", "engine/driver.py"
MASKS, PIPELINE = "engine/grammar_masks.py", "engine/step_pipeline.py"
STEP_TIMES, STEP_LIMITS = "engine/limits/step_times.py", "engine/limits/step_limits.py"


def apply(mutant: Mutant, source: str) -> str:
    """The source with the fault in it; raises when its line is not there, or the fault changes nothing."""
    begin = source.find(mutant.within)
    if begin < 0 or mutant.line not in source[begin:]:
        raise LookupError(f"{mutant.name}: {mutant.path} has no line {mutant.line!r} any more")
    if source.count(mutant.within or mutant.line) > 1:
        place = repr(mutant.within or mutant.line)
        raise LookupError(f"{mutant.name}: {place} is in {mutant.path} more than once; say `within` what")
    broken = source[:begin] + source[begin:].replace(mutant.line, mutant.fault, 1)
    if broken == source:
        raise LookupError(f"{mutant.name}: the fault is the line itself")
    try:
        compile(broken, mutant.path, "exec")
    except SyntaxError as error:
        raise LookupError(f"{mutant.name}: {mutant.path} is no Python with the fault in it: {error}") from None
    return broken


def outdated(mutants: Iterable[Mutant], sources: Path) -> list[str]:
    """A line for each mutant that cannot be made of the `sources`."""
    lines = []
    for mutant in mutants:
        try:
            apply(mutant, (sources / mutant.path).read_text())
        except (LookupError, FileNotFoundError) as error:
            lines.append(str(error))
    return lines
