"""Second turns of conversations whose pages the device had no room for: copied back from the host, or computed again.

    python bench/host_cache.py [--model default] [--talks 16] [--tokens 2000] [--host-cache-gib 4]
    python bench/host_cache.py --model random:llama-3.1-8b --talks 64 --turns 24 --tokens 4000 --resident 4 \\
        --host-cache-gib 48 --max-batch-prefill-tokens 4096 --few-programs    # on a GPU; 43 GiB of pages

In one process and one engine, so that both run under the same conditions: conversations of `tokens` tokens are computed
one after the other, more than the device's pages hold. Then each has a second turn, one after the other, and in every
pair of them one has its host pages hidden, so that it is computed again. Ratios are of medians. Then the same beside a
stream that decodes. Its steps are compared, those that copy pages with those that decode alone, and the pauses between
its tokens while the first token of a second turn is awaited, for either way. At last all second turns come at once:
first as they are, then with all pages hidden.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from engines import GREEDY, Answer, random_prompts, run_request

from quire.core.plan import Kind, Tier
from quire.engine.building.build import Built, build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.engine import Engine
from quire.engine.garbage_collection import freeze_gc, relax_gc
from quire.engine.observer import Observer, Step
from quire.executor.memory import reserve_device_memory
from quire.request import Request
from quire.settings.config import Config

STREAM = 5000  # the request that decodes beside the others
WAYS = ("restored", "computed")
QUIET_STEPS = 80  # of the stream alone


class StepTimes(Observer):
    """Times of steps in which sequences decode and no prompt is computed, by whether they copy pages. Those that begin
    no copies may run beside copies that others began."""

    def __init__(self) -> None:
        self.quiet: list[float] = []  # with no other request
        self.is_quiet = False
        self.alone: list[float] = []
        self.copying: dict[str, list[tuple[float, int, int]]] = {"restore": [], "only save": []}  # and their pages

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if not plan.chunks or any(chunk.kind is not Kind.DECODE for chunk in plan.chunks) or step.waited_for_compiler:
            return
        restored = sum(copy.source.tier is Tier.HOST for copy in plan.copies)
        saved = sum(copy.target.tier is Tier.HOST for copy in plan.copies)
        if restored or saved:
            self.copying["restore" if restored else "only save"].append((step.took_s, restored, saved))
        else:
            (self.quiet if self.is_quiet else self.alone).append(step.took_s)

    def show(self) -> None:
        if not self.quiet:
            return
        alone = statistics.median(self.quiet) * 1000
        print(f"steps of the stream alone: {alone:.2f} ms ({len(self.quiet)})")
        if self.alone:
            ms = statistics.median(self.alone) * 1000
            print(f"steps that begin no copies: {ms:.2f} ms ({len(self.alone)}), {100 * (ms / alone - 1):+.1f} %")
        for what, steps in self.copying.items():
            if steps:
                took, restored, saved = zip(*steps, strict=True)
                ms, longest = statistics.median(took) * 1000, max(took) * 1000
                print(f"steps that {what}: {ms:.2f} ms ({len(steps)}), the longest {longest:.2f}; "
                      f"{statistics.mean(restored):.1f} pages from the host and {statistics.mean(saved):.1f} to it: "
                      f"{100 * (ms / alone - 1):+.1f} %, of +5 % allowed", flush=True)  # fmt: skip


def second_turns(
    engine: Engine, prompts: list[tuple[int, ...]], first_id: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[Answer]]:
    """Turns by how their pages came. `before` is called before each."""
    turns: dict[str, list[Answer]] = {way: [] for way in WAYS}
    for number, prompt in enumerate(prompts):
        before()
        # Another salt has no pages anywhere.
        salt = "" if number % 2 == 0 else f"hidden {first_id}"
        turn = run_request(engine, Request(first_id + number, (*prompt, 5, 6, 7), 2, GREEDY, salt=salt), STREAM)
        if salt:
            turns["computed"].append(turn)
        elif turn.cached_tokens > len(prompt) * 0.9:
            turns["restored"].append(turn)
    return turns


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that `build` reads."""
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--resident", type=int, default=3, help="conversations that the device has pages for")
    parser.add_argument("--host-cache-gib", type=float, default=4.0)
    parser.add_argument("--max-batch-prefill-tokens", type=int, help="fewer make fewer programs to compile")
    parser.add_argument("--few-programs", action="store_true", help="compile those alone that are needed")
    parser.add_argument("--reproducible", action="store_true", help="both ways have the same bits then")


def build(asked: argparse.Namespace) -> Built:
    """An engine whose device has pages for a few conversations."""
    config = Config(
        asked.model, host_cache_gib=asked.host_cache_gib, max_total_tokens=asked.tokens + 64, max_batch_size=4,
        max_batch_prefill_tokens=asked.max_batch_prefill_tokens, reproducible=asked.reproducible,
    )  # fmt: skip
    relax_gc()  # as a server does
    reserve_device_memory(asked.host_cache_gib)  # before anything looks for devices
    page_size = plan_deployment(replace(config, host_cache_gib=0.0)).limits.page_size
    needed = -(-(asked.tokens + 64) // page_size)
    built = build_engine(replace(plan_deployment(replace(config, num_pages=asked.resident * needed)), is_served=True))
    if asked.few_programs:
        catalog = built.executor.programs.catalog
        few = [*catalog.first, *catalog.early, *catalog.programs_for_prompt(asked.tokens + 3)]
        catalog.keys = list(dict.fromkeys(few))
    for _ in built.warm_up():
        pass
    freeze_gc()
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--talks", type=int, default=16)
    parser.add_argument("--turns", type=int, help="conversations of which each has a turn of its own; by default all")
    asked = parser.parse_args()
    begun_s = time.monotonic()
    built = build(asked)
    engine, limits = built.engine, built.deployment.limits
    print(f"started in {time.monotonic() - begun_s:.0f} s; {type(built.executor.host_pages).__name__}", flush=True)
    prompts = random_prompts(asked.talks, asked.tokens, built.deployment.model.vocab_size)
    for number, prompt in enumerate(prompts):
        run_request(engine, Request(number, prompt, 2, GREEDY))
    print(f"{asked.talks} conversations of {asked.tokens} tokens; {limits.num_pages - 1} pages on the device, "
          f"{limits.host_pages} on the host, of {limits.host_page_bytes / 2**10:.0f} KiB; a step restores up to "
          f"{limits.max_page_restores}; first turns done after {time.monotonic() - begun_s:.0f} s",
          flush=True)  # fmt: skip
    show_all(engine, prompts, asked.tokens - 10, asked.turns)
    stats = engine.scheduler.stats()
    print(f"{stats.saved_pages} pages copied to the host, {stats.restored_pages} from it, {stats.lost_pages} lost; "
          f"{engine.executor.num_late} programs compiled late; {time.monotonic() - begun_s:.0f} s in all")  # fmt: skip


def show_all(engine: Engine, prompts: list[tuple[int, ...]], length: int, turns: int | None = None) -> None:
    """`length`: tokens of the stream. `turns`: conversations that have turns one after the other."""
    second_turns(engine, prompts[:2], 900)  # whatever is done for the first time
    show("alone", second_turns(engine, prompts[:turns], 1000))
    show_beside_a_stream(engine, prompts[:turns], length)
    show_at_once(engine, prompts)


def show_beside_a_stream(engine: Engine, prompts: list[tuple[int, ...]], length: int) -> None:
    times = StepTimes()
    engine.observe(times)

    def keep_a_stream() -> None:
        if not engine.scheduler.has(STREAM):
            engine.add(Request(STREAM, (1, 2, 3), length, GREEDY, ignore_end=True))

    keep_a_stream()
    for number in range(QUIET_STEPS):
        times.is_quiet = number >= QUIET_STEPS // 4
        engine.step()
    times.is_quiet = False
    turns = second_turns(engine, prompts, 2000, keep_a_stream)
    show("beside a stream", turns)
    for way in WAYS:
        pauses = [1000 * pause for turn in turns[way] for pause in turn.pauses_s]
        if pauses:
            longest = statistics.median(1000 * max(turn.pauses_s) for turn in turns[way] if turn.pauses_s)
            print(f"pauses of the stream until a first token is {way}: median {statistics.median(pauses):.2f} ms, "
                  f"the longest of a turn {longest:.2f} ms (median of turns), of all {max(pauses):.2f} ms, "
                  f"{len(pauses) / len(turns[way]):.1f} tokens a turn")  # fmt: skip
    engine.abort(STREAM)
    times.show()


def show_at_once(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    """All second turns come together."""
    means, answers = {}, {}
    for first_id, way in zip((3000, 4000), WAYS, strict=True):
        begun_s, first_s, cached, answers[way] = time.monotonic(), {}, 0, {}
        for number, prompt in enumerate(prompts):
            salt = "hidden at once" if way == "computed" else ""
            engine.add(Request(first_id + number, (*prompt, 5, 6, 7), 2, GREEDY, salt=salt))
        while not engine.is_idle:
            for update in engine.step().updates:
                answers[way].setdefault(update.request_id - first_id, []).extend(update.tokens)
                if update.tokens and update.request_id not in first_s:
                    first_s[update.request_id] = time.monotonic() - begun_s
                    cached += update.cached_tokens
        means[way] = statistics.mean(first_s.values()) * 1000
        print(f"{len(prompts)} second turns at once, {way}: first tokens after {means[way]:.0f} ms in the mean, "
              f"the last after {max(first_s.values()) * 1000:.0f}; {cached} tokens cached", flush=True)  # fmt: skip
    same = sum(answers["restored"][number] == answers["computed"][number] for number in range(len(prompts)))
    print(f"the mean of those restored is {means['computed'] / means['restored']:.1f}x as fast; {same} of "
          f"{len(prompts)} have the same tokens")  # fmt: skip


def show(name: str, turns: dict[str, list[Answer]]) -> None:
    if not turns["restored"] or not turns["computed"]:
        print(f"second turns {name}: {len(turns['restored'])} restored, {len(turns['computed'])} computed")
        return
    restored, computed = (statistics.median(turn.first_s for turn in turns[way]) * 1000 for way in WAYS)
    print(f"second turns {name}: first token after {restored:.1f} ms restored ({len(turns['restored'])}), "
          f"{computed:.1f} ms computed ({len(turns['computed'])}): {computed / restored:.1f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
