"""Host time of a run by activity, waiting for the device apart: does the host hold the device up?

    python bench/timeline.py random:qwen3-0.6b --case nano256 [--trace FILE]

Every step of one run is timed: planning, starting it, waiting for its result, taking that in, and the rest, which is
handing out tokens. Steps are put together by what they hold. Where the host waits for nearly all of a step, the device
is never held up. `--trace` writes the run for chrome://tracing or ui.perfetto.dev.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from quire import LLM, Config
from quire.cli.bench import scenarios
from quire.core.plan import Kind, StepPlan, StepResult
from quire.request import SamplingParams


class Span(NamedTuple):
    part: str
    step: int
    begun_s: float
    took_s: float


class Watched:
    """An executor and a scheduler that take down when each of their calls began and how long it took."""

    def __init__(self, llm: LLM) -> None:
        self.spans: list[Span] = []
        self.plans: dict[int, StepPlan] = {}
        self.ended_s: dict[int, float] = {}
        engine: Any = llm.engine
        self._executor, scheduler = engine.executor, engine.scheduler
        self._plan, self._complete = scheduler.plan, scheduler.complete
        engine.executor = self
        scheduler.plan, scheduler.complete = self.plan, self.complete

    def plan(self) -> StepPlan | None:
        begun = time.perf_counter()
        plan: StepPlan | None = self._plan()
        if plan is not None:
            self.plans[plan.step] = plan
            self._note("plan", plan.step, begun)
        return plan

    def submit(self, plan: StepPlan) -> "Pending":
        begun = time.perf_counter()
        pending = self._executor.submit(plan)
        self._note("start", plan.step, begun)
        return Pending(self, plan, pending)

    def complete(self, result: StepResult) -> Any:
        begun = time.perf_counter()
        outcome = self._complete(result)
        self._note("complete", result.step, begun)
        return outcome

    def note_result(self, step: int, begun: float) -> None:
        self._note("wait", step, begun)
        self.ended_s[step] = time.perf_counter()

    def _note(self, part: str, step: int, begun: float) -> None:
        self.spans.append(Span(part, step, begun, time.perf_counter() - begun))

    def reset(self) -> None:
        self._executor.reset()

    @property
    def num_late(self) -> int:
        return int(self._executor.num_late)


class Pending:
    def __init__(self, watched: Watched, plan: StepPlan, pending: Any) -> None:
        self._watched, self._plan, self._pending = watched, plan, pending

    def sample(self, masks: dict[int, bytes]) -> None:
        self._pending.sample(masks)

    def result(self) -> StepResult:
        begun = time.perf_counter()
        result: StepResult = self._pending.result()
        self._watched.note_result(self._plan.step, begun)
        return result


def kind_of(plan: StepPlan) -> str:
    filled = sum(chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL)
    if filled:
        return f"prompts, up to {1 << (filled - 1).bit_length():5d} tokens"
    rows = 1 << (len(plan.chunks) - 1).bit_length()
    return f"up to {rows:3d} decodes" + (f", {plan.burst} tokens each" if plan.burst > 1 else "")


def table(watched: Watched) -> list[str]:
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in watched.spans:
        spent[kind_of(watched.plans[span.step])][span.part] += span.took_s
    last = None
    for step, ended in sorted(watched.ended_s.items()):
        kind = kind_of(watched.plans[step])
        spent[kind]["steps"] += 1
        if last is not None:
            spent[kind]["between"] += ended - last
        last = ended
    rows = [
        f"| {'steps of':32s} | number | ms each | plan | start | complete | wait |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, sums in sorted(spent.items()):
        count = sums["steps"]
        values = [sums[part] / count * 1000 for part in ("between", "plan", "start", "complete", "wait")]
        rows.append(f"| {kind:32s} | {count:.0f} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--case", default="nano256", help="of `quire bench offline`; several with commas")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    loads = {case: scenarios.load(case) for case in given.case.split(",")}
    llm = LLM(Config(model=given.model, quantize=given.quantize, kv_cache_dtype=given.kv_cache_dtype))
    watched = Watched(llm)
    for case, make in loads.items():
        work = make(llm.deployment.model.vocab_size)
        for store in (watched.spans, watched.plans, watched.ended_s):
            store.clear()  # type: ignore[attr-defined]
        begun, first_s, tokens = time.perf_counter(), {}, 0
        for delta in llm.stream(work.prompts, SamplingParams(), max_tokens=work.new_tokens, ignore_end=True, seed=0):
            first_s.setdefault(delta.index, time.perf_counter() - begun)
            tokens += len(delta.token_ids)
        seconds = time.perf_counter() - begun
        ordered = sorted(first_s.values())
        print(f"\n{case}: {len(work.prompts)} prompts: {tokens} tokens in {seconds:.3f} s, {tokens / seconds:.0f} /s")
        print(f"first tokens after {ordered[0]:.3f} to {ordered[-1]:.3f} s", flush=True)
        print("\n".join(table(watched)), flush=True)
    if given.trace is not None:
        events = [
            {
                "name": f"{span.part} {span.step}",
                "ph": "X",
                "pid": 0,
                "tid": span.part,
                "ts": span.begun_s * 1e6,
                "dur": span.took_s * 1e6,
            }
            for span in watched.spans
        ]
        given.trace.write_text(json.dumps(events))
    llm.close()


if __name__ == "__main__":
    main()
