"""Breaks the core one line at a time and shows that the tests notice.

    python tests/core/mutants.py [--jobs 2] [--only WORD]

Each mutant is one plausible fault in a copy of the package, and the tests of the core and of the engine run against it
until one fails. A mutant that survives is a fault that could be made without anyone noticing; it must be explained
here, or the run fails. No mutant runs while the line of one is not in the source any more: the run names them and
fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings

# Without shrinking: that a test fails is all there is to know.
settings.register_profile(
    "mutants",
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("quire", "tests", "pyproject.toml")
# Those that kill most, fastest, come first.
TESTS = ("tests/core/test_page_pool.py", "tests/core/test_scheduler.py", "tests/core/test_sharing.py",
         "tests/core/test_admission.py", "tests/core/test_bursts.py", "tests/core/test_speculation.py",
         "tests/core/test_page_groups.py", "tests/core/test_prefix_cache.py",
         "tests/test_retry_reservations.py", "tests/core/test_schedules.py", "tests/engine")  # fmt: skip
TIMEOUT_S = 120


class Mutant(NamedTuple):
    name: str
    path: str  # below quire
    line: str  # stands exactly once in that file; with `within`, the first after it
    fault: str
    within: str = ""  # text that comes before it, exactly once in that file
    explanation: str = ""  # why it may survive: no behaviour differs


POOL, CACHE, TREE, QUEUE = "core/page_pool.py", "core/prefix_cache.py", "core/prefix_tree.py", "core/queue.py"
RESERVATIONS = "retry_reservations.py"
RUNNING, SEQUENCE, REQUESTS = "core/running.py", "core/sequence.py", "core/requests.py"
PLANNER, COMPLETION, BUDGET = "core/planner.py", "core/completion.py", "core/step_budget.py"
SCHEDULER, LIMITS, GUESSES = "core/scheduler.py", "core/limits.py", "core/speculation.py"
STEP_BUILDER = "core/step_builder.py"
HEAP, DEADLINES = "core/lazy_heap.py", "core/deadlines.py"
ISOLATION, ENGINE, DRIVER = "engine/fault_isolation.py", "engine/engine.py", "engine/driver.py"
MASKS, PIPELINE, STEP_TIME = "engine/grammar_masks.py", "engine/step_pipeline.py", "engine/step_time.py"

MUTANTS = (
    # Pages
    Mutant("page 0 is handed out", POOL, "list(range(num_pages - 1, 0, -1))", "list(range(num_pages - 1, -1, -1))"),
    Mutant("a taken page has no holder", POOL, "self._holders[page] = 1", "self._holders[page] = 0"),
    Mutant("taking gives what there is", POOL, "if count > len(free):", "if not free and count:"),
    Mutant(
        "double release goes unnoticed",
        POOL,
        "if not self._holders[page]:",
        "if self._holders[page] < -1:",
        within="def release",
    ),
    Mutant(
        "a page is free while it is held",
        POOL,
        "            if not self._holders[page]:\n                self._free.append(page)",
        "            if True:\n                self._free.append(page)",
    ),
    Mutant("missing hold on matched pages", RUNNING, "cache.hold(matched)", "pass"),
    Mutant("matched pages stay held when a start fails", RUNNING, "cache.release(matched)", "pass"),
    Mutant(
        "pages are released twice",
        RUNNING,
        "self.cache.release(page for table in sequence.tables for page in table if page)",
        "self.cache.release(page for table in [*sequence.tables, sequence.tables[0]] for page in table if page)",
    ),
    Mutant(
        "pages are never released",
        RUNNING,
        "self.cache.release(page for table in sequence.tables for page in table if page)",
        "pass",
    ),
    Mutant(
        "off by one page", LIMITS, "return -(-num_tokens // self.page_size)", "return num_tokens // self.page_size + 1"
    ),
    Mutant(
        "one page too few", LIMITS, "return -(-num_tokens // self.page_size)", "return num_tokens // self.page_size"
    ),
    Mutant(
        "a full page looks like room",
        RUNNING,
        "sequence.plain_end = end if end < sequence.limit else sequence.limit - 1",
        "sequence.plain_end = end + 1 if end + 1 < sequence.limit else sequence.limit - 1",
    ),
    Mutant("no headroom for those that run", RUNNING, "count = self._num_groups * len(self)", "count = 0"),
    Mutant(
        "prefills need no more pages",
        RUNNING,
        "count += max(0, self._limits.pages_to_start",
        "count += min(0, self._limits.pages_to_start",
    ),
    # Page groups
    Mutant(
        "a window's page is given back early",
        RUNNING,
        "sequence.num_computed - window + 1)",
        "sequence.num_computed - window + 2)",
    ),
    Mutant(
        "a window's page is given back before results",
        RUNNING,
        "return max(0, sequence.num_computed -",
        "return max(0, sequence.num_planned -",
    ),
    Mutant(
        "nothing is given back while a prompt is computed",
        RUNNING,
        "        self._give_back(sequence)\n        self._queue.settle",
        "        self._queue.settle",
    ),
    Mutant(
        "nothing is given back while a sequence decodes",
        RUNNING,
        "            self._give_back(sequence)\n        count",
        "            pass\n        count",
    ),
    Mutant(
        "what is given back is not published",
        RUNNING,
        "                self._publish(sequence)\n                table",
        "                table",
    ),
    Mutant("pages that are given back stay held", RUNNING, "self.cache.release(table[held:first])", "pass"),
    Mutant(
        "a page that was given back stays in the table", RUNNING, "table[held:first] = [0] * (first - held)", "pass"
    ),
    Mutant(
        "one group gets the pages of all",
        RUNNING,
        "tables[group] += pages[group::count]",
        "tables[0] += pages[group::count]",
    ),
    Mutant(
        "a sequence takes pages for one group", RUNNING, "count = num_pages * self._num_groups", "count = num_pages"
    ),
    Mutant(
        "one that runs alone does not wait for its window",
        RUNNING,
        "waits = bool(self._windows) and",
        "waits = False and",
    ),
    Mutant(
        "one that runs alone takes more than there is",
        RUNNING,
        "length = min(length, max(1, self._num_fitting(num_pages) - start))",
        "pass",
    ),
    Mutant(
        "one that starts alone takes more than there is",
        RUNNING,
        "length = min(length, self._num_fitting(len(tables[0])) - start)",
        "pass",
    ),
    Mutant(
        "a window touches a page fewer",
        LIMITS,
        "step_tokens - 3) // self.page_size + 2",
        "step_tokens - 3) // self.page_size + 1",
    ),
    Mutant("pages of one group are counted", LIMITS, "            total += count", "            total = count"),
    Mutant("a window needs a page fewer to go on", CACHE, "-(-(window - 1) // page_size)", "(window - 1) // page_size"),
    Mutant(
        "a window needs a page more to go on", CACHE, "-(-(window - 1) // page_size)", "-(-window // page_size) + 1"
    ),
    Mutant("a missing page of a window is overlooked", CACHE, "if missing is not None:", "if False:"),
    Mutant(
        "a page of a window counts as evictable while it is held",
        CACHE,
        "                    self.num_evictable -= 1\n\n    def release",
        "                    pass\n\n    def release",
    ),
    Mutant(
        "a page of a window that is let go is not listed",
        CACHE,
        "                self._list(node, group)\n\n    def take",
        "\n    def take",
    ),
    Mutant("a branch without pages stays", CACHE, "if not node.children and not any(node.pages):", "if False:"),
    Mutant(
        "a page that was given back is not computed again",
        CACHE,
        "if table[index] and not child.pages[group]:",
        "if table[index] and not any(child.pages):",
    ),
    # Copies
    Mutant("a page that begins otherwise is copied", TREE, "and key[:end] == tokens[:end] and", "and"),
    Mutant("a part of a page is copied", TREE, "and all(child.pages):", "and child.pages[0]:"),
    Mutant(
        "a shorter beginning is copied",
        TREE,
        "        end = (most + 1) * TOKEN_BYTES\n",
        "        end = least * TOKEN_BYTES\n",
    ),
    Mutant("copied pages stay held", RUNNING, "        cache.release(copied)\n", ""),
    Mutant(
        "a copied page is evicted for its copy",
        RUNNING,
        "cache.hold(copied)  #",
        "pass  #",
        explanation="holds are released too: see above",
    ),
    Mutant("what was copied is computed again", RUNNING, "* limits.page_size + match.num_begun", "* limits.page_size"),
    Mutant(
        "a start without its copy is not tried",
        RUNNING,
        "max_tokens) if copied else None",
        "max_tokens) if 0 else None",
    ),
    Mutant(
        "all tokens of a prompt are copied", CACHE, "[: (max_tokens - num_pages * self._page_size) * TOKEN_BYTES]", ""
    ),
    # The prefix cache
    Mutant(
        "the salt is ignored",
        CACHE,
        "node = path[-1] if path else self._roots.get(salt)",
        "node = path[-1] if path else next(iter(self._roots.values()), None)",
    ),
    Mutant("the prefix key is ignored", REQUESTS, 'salt = f"{key}+{request.salt}"', 'salt = f"+{request.salt}"'),
    Mutant("the wrong parent in the tree", CACHE, "Node(key, parent, [0]", "Node(key, parent.parent or parent, [0]"),
    Mutant(
        "the wrong key in the tree",
        CACHE,
        "start = num_pages * self._page_size",
        "start = max(0, num_pages - 1) * self._page_size",
    ),
    Mutant(
        "an evicted cursor is trusted",
        CACHE,
        "isinstance(known.end, Node) and known.end.parent is not None:",
        "isinstance(known.end, Node):",
    ),
    Mutant("an evicted match is trusted", CACHE, "while path and path[-1].parent is None:", "while False:"),
    Mutant("a held page is evicted", CACHE, "if self._pool.holders(page) > 1 or (", "if ("),
    Mutant("a page with followers is evicted", CACHE, "and (node.children or node.pins)):", "and node.pins):"),
    Mutant(
        "the most recently used goes first",
        CACHE,
        "self._candidates.push(node.last_used,",
        "self._candidates.push(-node.last_used,",
    ),
    Mutant(
        "use does not count",
        CACHE,
        "            self._touch(node)\n        elif path",
        "            pass\n        elif path",
    ),
    Mutant(
        "a parent forgets the use of its children",
        CACHE,
        "parent.last_used = max(parent.last_used, node.last_used)",
        "pass",
    ),
    Mutant("the tree does not hold its pages", CACHE, "self._pool.hold((page,))", "pass"),
    Mutant(
        "the parent of the last child is not listed", CACHE, "self._list(parent, self._is_full.index(True))", "pass"
    ),
    Mutant("an empty root stays", CACHE, "del self._roots[_decoded(parent.key)]", "pass"),
    Mutant("more is evicted than is short", CACHE, "self.evict(count - self._pool.num_free)", "self.evict(count)"),
    Mutant(
        "a page before a held one looks like one that can go",
        CACHE,
        "while node.pins == 1 and node.parent is not None:",
        "if node.pins == 1 and node.parent is not None:",
    ),
    Mutant(
        "a page stays pinned when the one after it is let go",
        CACHE,
        "while not node.pins and node.parent is not None:",
        "if not node.pins and node.parent is not None:",
    ),
    Mutant(
        "taking evicts although it will not do",
        CACHE,
        "if pages is None and count <= self.num_available:",
        "if pages is None:",
    ),
    # Sharing a prefix that is being computed
    Mutant("parked sequences are forgotten", QUEUE, "            self.push(waited)", "            pass"),
    Mutant("an aborted one stays parked", QUEUE, "self._prefills.leave(sequence)", "pass"),
    Mutant("any number is parked", QUEUE, "if len(self._prefills) >= self._max_parked:", "if False:"),
    Mutant(
        "nobody waits for a shared prefix", QUEUE, "if key is not None and key not in self._waiting_for:", "if False:"
    ),
    Mutant("those that waited stay marked", QUEUE, "self._parked.difference_update(waited)", "pass"),
    # Publication
    Mutant(
        "published before completion",
        RUNNING,
        "num_pages = sequence.num_computed // self._page_size",
        "num_pages = min(sequence.num_planned, len(sequence.tokens)) // self._page_size",
    ),
    Mutant(
        "an incomplete page is published",
        RUNNING,
        "num_pages = sequence.num_computed // self._page_size",
        "num_pages = -(-sequence.num_computed // self._page_size)",
    ),
    Mutant(
        "a prompt is never published while it runs",
        COMPLETION,
        "self._running.publish(sequence)",
        "pass",
    ),
    Mutant("what ended is not published", RUNNING, "        if keep_pages:", "        if False:"),
    Mutant("the last token is not computed", SEQUENCE, "return len(self.tokens) - 1", "return len(self.tokens)"),
    Mutant("a lost device's pages stay cached", SCHEDULER, "self._running.cache.clear()", "pass"),
    # Slots and states
    Mutant("a slot is leaked", RUNNING, "self._free_slots.append(sequence.slot)", "pass"),
    Mutant("the epoch does not change on preemption", SEQUENCE, "self.epoch += 1", "pass"),
    Mutant("the epoch does not change at the end", REQUESTS, "sequence.epoch += 1", "pass"),
    Mutant(
        "a late decode result is taken",
        COMPLETION,
        "            if chunk.epoch != sequence.epoch:",
        "            if False:",
        within="def _apply_decodes",
    ),
    Mutant(
        "a late prefill result is taken",
        COMPLETION,
        "            if chunk.epoch != sequence.epoch:",
        "            if False:",
        within="sampled = islice",
    ),
    Mutant("a preempted row keeps its chunk", PLANNER, "chunk.epoch == row.epoch", "True"),
    Mutant(
        "a preempted sequence is lost",
        RUNNING,
        "self._queue.push(sequence)",
        "pass",
    ),
    Mutant(
        "preemption loses a token",
        PLANNER,
        "generated=tuple(sequence.tokens[sequence.num_prompt :])",
        "generated=tuple(sequence.tokens[sequence.num_prompt + 1 :])",
    ),
    Mutant("the oldest is preempted", RUNNING, "youngest = max(self, key=_age)", "youngest = min(self, key=_age)"),
    Mutant(
        "a finished sequence goes on",
        COMPLETION,
        "                    self._requests.end(sequence)\n            updates",
        "                    pass\n            updates",
    ),
    Mutant("the sum of the limits only grows", RUNNING, "self.max_tokens -= sequence.limit", "pass"),
    # Budgets and admission
    Mutant(
        "the step budget is ignored",
        BUDGET,
        "min(self._max_step_tokens - num_decodes, self.prefill_tokens)",
        "self.prefill_tokens",
    ),
    Mutant(
        "the prefill budget is ignored",
        BUDGET,
        "min(self._max_step_tokens - num_decodes, self.prefill_tokens)",
        "self._max_step_tokens - num_decodes",
    ),
    Mutant("prompts beside decodes have no bound", BUDGET, "limit is None or limit >= tokens:", "True:"),
    Mutant(
        "prompts beside decodes are no good size", BUDGET, "if size > num_decodes else limit", "if False else limit"
    ),
    Mutant("a good size forgets the decodes", BUDGET, "return size - num_decodes if", "return size if"),
    Mutant(
        "no prompt is cut for a good size", BUDGET, "return excess if padding > excess", "return 0 if padding > excess"
    ),
    Mutant("a prompt alone is cut as beside decodes", BUDGET, "else OF_A_STEP)", "else BESIDE_DECODES)"),
    Mutant(
        "a prompt that is cut keeps its pages",
        PLANNER,
        "                if length < reserved:\n",
        "                if False:\n",
    ),
    Mutant("prompts do not count against the budget", PLANNER, "step.budget -= length\n", "pass\n"),
    Mutant("prompts do not count against the share", PLANNER, "step.allowance -= length\n", "pass\n"),
    Mutant("those behind a long prompt may have all", PLANNER, "step.budget // SHARE_BEHIND", "step.budget"),
    Mutant("those behind a long prompt get nothing", PLANNER, "step.budget // SHARE_BEHIND", "0"),
    Mutant(
        "a long prompt that waits takes the share",
        PLANNER,
        "is not None and rest > step.allowance and not",
        "is not None and False and not",
    ),
    Mutant("a long prompt that was passed is lost", PLANNER, "            queue.push(sequence)\n", ""),
    Mutant("short prompts are stuck in small steps", PLANNER, "return step.allowance == step.share", "return False"),
    Mutant("many prompts begin in one share", PLANNER, "return step.allowance == step.share", "return True"),
    Mutant(
        "long prompts begin in small shares",
        PLANNER,
        " and rest <= self._limits.max_batch_prefill_tokens // SHARE_BEHIND",
        "",
    ),
    Mutant(
        "a chunk brings more pages than it fills",
        PLANNER,
        "self._running.trim(sequence, sequence.num_planned + length)",
        "pass",
    ),
    Mutant("any number of long prompts is passed", PLANNER, "if len(step.passed) == MAX_PASSED:", "if False:"),
    Mutant("the total of tokens is ignored", PLANNER, "return total is None or", "return True or"),
    Mutant("younger ones pass a prefill that is short", PLANNER, 'self.blocked_by = "pages"  # none', "pass  # none"),
    Mutant("admissions never wait", PLANNER, "if len(self._queue) + 1 > ", "if True or "),
    Mutant("admissions wait forever", PLANNER, "or self._tokens_since_admission >= limits.max_waiting_tokens:", ":"),
    Mutant("the first sequences join others", PLANNER, "others_run = bool(running)", "others_run = True"),
    Mutant("priorities are ignored", SEQUENCE, "return self.request.priority, self.id", "return 0, self.id"),
    Mutant(
        "focus is ignored in the queue",
        QUEUE,
        "if self.focus is not None:",
        "if False:",
    ),
    Mutant("who runs out of focus goes on", SCHEDULER, "if sequence not in chosen:", "if False:"),
    # Bursts
    Mutant("a burst runs past those who could join", PLANNER, "if queue and running.has_free_slot", "if False"),
    Mutant(
        "a burst does not wait for prompts",
        PLANNER,
        "or running.prefilling or running.num_guided:",
        "or running.num_guided:",
    ),
    Mutant(
        "a burst outruns a grammar", PLANNER, "or running.prefilling or running.num_guided:", "or running.prefilling:"
    ),
    Mutant("a burst is longer than its request", PLANNER, "min(most, sequence.limit - 1 - start)", "most"),
    Mutant("a burst runs over its pages", PLANNER, "length = min(length, sequence.page_end - start)", "pass"),
    Mutant(
        "what lies beyond the end is shared",
        COMPLETION,
        "sequence.num_computed = len(known) - 1  # not",
        "sequence.num_computed = chunk.start + chunk.length  # not",
    ),
    Mutant(
        "a row that failed after its end has failed",
        COMPLETION,
        "if failed is not None and not (tokens and",
        "if failed is not None and not (0 and",
    ),
    Mutant("the queue has no bound", QUEUE, "if len(self) + num_kept + request.samples <= most:", "if True:"),
    Mutant("nobody's place is kept", QUEUE, "self._reservations.num_kept_from(client)", "0"),
    Mutant("an empty line keeps places", QUEUE, "num_kept_from(client) if len(self) else 0", "num_kept_from(client)"),
    Mutant("who is let in keeps its reservation", QUEUE, "self._reservations.admitted(client)", "pass"),
    Mutant("everybody is told the same time", RESERVATIONS, "self._last_due_s + apart_s)", "0.0)"),
    Mutant("too many are told to come together", RESERVATIONS, "TOGETHER_S = 1.25", "TOGETHER_S = 1.0"),
    Mutant("who comes back early gets another time", RESERVATIONS, "own is not None and own.due_s > now:", "False:"),
    Mutant("who comes back has no place", RESERVATIONS, "if own is not None and own.due_s <= now <=", "if 1 <"),
    Mutant("places are kept too late", RESERVATIONS, "reservation.due_s > now + LEAD_S:", "reservation.due_s > now:"),
    Mutant("no-shows are kept for ever", RESERVATIONS, "self._by_client.popitem(last=False)", "break"),
    Mutant("a crowd fills the memory", RESERVATIONS, "if len(self._by_client) < MAX_RESERVATIONS:", "if True:"),
    Mutant(
        "what fits exactly is refused",
        LIMITS,
        "if pages > self.num_pages - 1:",
        "if pages >= self.num_pages - 1:",
    ),
    Mutant("what can never fit is taken", LIMITS, "if pages > self.num_pages - 1:", "if False:"),
    # Time
    Mutant("deadlines are ignored", DEADLINES, "if first is None or first[0] > self._clock():", "if True:"),
    Mutant("a deadline comes late", DEADLINES, "first[0] > self._clock()", "first[0] >= self._clock()"),
    Mutant(
        "the queue timeout ends what runs",
        REQUESTS,
        "elif len(sequences) == request.samples and all(",
        "elif True or all(",
    ),
    Mutant("deadlines outlive their request", REQUESTS, "self._deadlines.forget(sequence.request_id)", "pass"),
    # Tokens
    Mutant("the minimum is off by one", SEQUENCE, "if count >= self._min_tokens:", "if count > self._min_tokens:"),
    Mutant(
        "the length is off by one",
        SEQUENCE,
        "if count >= self.max_tokens else None",
        "if count > self.max_tokens else None",
    ),
    Mutant(
        "the end is not ignored when asked",
        SEQUENCE,
        "frozenset() if request.ignore_end else",
        "frozenset() if False else",
    ),
    Mutant(
        "look-ahead goes past the length",
        RUNNING,
        "sequence.plain_end = end if end < sequence.limit else sequence.limit - 1",
        "sequence.plain_end = end",
    ),
    Mutant(
        "a prefill that does not reach the end samples",
        PLANNER,
        "samples=reaches_end and end < sequence.limit",
        "samples=end < sequence.limit",
    ),
    Mutant(
        "prompt scores are handed out twice",
        COMPLETION,
        "new = logprobs[max(0, sequence.num_scored - chunk.start) :]",
        "new = logprobs",
    ),
    Mutant("a discarded member of a heap comes up", HEAP, "if self._entry_of.get(member) == entry:", "if True:"),
    # The engine
    Mutant(
        "look-ahead is one too many",
        ENGINE,
        "if len(steps) > self._lookahead or",
        "if len(steps) > self._lookahead + 1 or",
    ),
    Mutant("the device is not rebuilt", ENGINE, "self._reset_device()", "pass", within="def _recover"),
    Mutant("the scheduler is not restarted", ENGINE, "self.scheduler.restart()", "pass", within="def _recover"),
    Mutant("the first suspect is guilty", ISOLATION, "if accused != self._doubtful:", "if False:"),
    Mutant(
        "the second half is never tried",
        ISOLATION,
        "for half in (suspects[middle:], suspects[:middle]) if half",
        "for half in (suspects[:middle],) if half",
    ),
    Mutant("a failing probe is forgotten", ISOLATION, "self._num_probe_faults += 1", "pass"),
    Mutant(
        "a suspect is clear as soon as it runs",
        ISOLATION,
        "if chunk.start + chunk.length >= targets.get(chunk.sample, chunk.start + chunk.length + 1):",
        "if chunk.sample in targets:",
    ),
    Mutant("the journal misses new requests", ISOLATION, "self._write_journal()", "pass", within="def step_launched"),
    Mutant("ended requests stay in the engine", ENGINE, "self._samples_left.pop(request_id, None)", "pass"),
    Mutant("a step takes the time of the one before", PIPELINE, "max(step.launched_s, self._last_end_s)", "0.0"),
    Mutant("prompts starve beside slow decodes", STEP_TIME, "max(self._least, int(tokens))", "int(tokens)"),
    Mutant("prompts beside decodes are never cut", STEP_TIME, "self._max_step_s, load), 2", "9e9, load), 2"),
    Mutant("prompts are cut without a prediction", STEP_TIME, "self._max_step_s, load), 2", "0.0, load), 2"),
    Mutant("one slow step is believed", STEP_TIME, "max(predicted_s, took_s, 1e-6)", "max(predicted_s, 1e-6)"),
    Mutant("a failed port keeps its requests", DRIVER, "            port.close()", "            pass"),
    Mutant("requests are not told of a defect", DRIVER, "self._fail_everyone(self._failure)", "pass"),
    # Grammars
    Mutant(
        "masks come before the tokens they follow from",
        ENGINE,
        "awaits_masks or len(self._steps) > 1:",
        "awaits_masks or len(self._steps) > 9:",
    ),
    Mutant("a step is launched before the last one samples", ENGINE, "or not self._send_masks() or", "or"),
    Mutant(
        "nobody hears of a grammar that fails",
        ENGINE,
        "outcome._replace(failures=grammar_failures + outcome.failures) if grammar_failures else outcome",
        "outcome",
    ),
    Mutant(
        "a guided request goes on after it failed",
        ENGINE,
        "            self.abort(failure.request_id)\n        self._grammar_failures",
        "        self._grammar_failures",
    ),
    Mutant("matchers miss what is sampled", MASKS, "elif update.tokens:", "elif len(update.tokens) > 1:"),
    Mutant(
        "an answer that goes on begins its grammar anew",
        MASKS,
        "Guided(matcher, len(request.prompt), so_far[sample] or ())",
        "Guided(matcher, len(request.prompt), ())",
    ),
    Mutant("matchers outlive their requests", ENGINE, "self._masks.forget(request_id)", "pass"),
    Mutant(
        "a guided chunk is not named",
        STEP_BUILDER,
        "if chunk.samples and row.request.grammar is not None)",
        "if False)",
    ),
    Mutant(
        "a chunk that samples nothing is guided", STEP_BUILDER, "if chunk.samples and row.request", "if row.request"
    ),
    Mutant(
        "forced tokens are not appended",
        COMPLETION,
        "sequence.forced_before(chunk.start + chunk.length) + tokens",
        "tokens",
    ),
    Mutant("forced tokens take no budget", PLANNER, "1 + step.budget)", "99)"),
    Mutant("forced tokens take more than a page", PLANNER, "self._limits.page_size, 1 + step", "99, 1 + step"),
    Mutant(
        "forced tokens are begun from the wrong place",
        STEP_BUILDER,
        "ForcedTokens(chunk.slot, len(row.tokens),",
        "ForcedTokens(chunk.slot, chunk.start,",
    ),
    Mutant(
        "log-probabilities of forced tokens are lost", SCHEDULER, " and sequence.request.sampling.logprobs is None", ""
    ),
    Mutant("a forced token gets the mask after it", MASKS, "position - self.num_known", "len(self.forced())"),
    Mutant(
        "a matcher sees forced tokens twice",
        MASKS,
        "self.matcher.advance(tokens[count:])",
        "self.matcher.advance(tokens)",
    ),
    Mutant("what was aborted is added once it is compiled", DRIVER, "self._preparing.forget(request_id)", "pass"),
    Mutant("compiling holds everyone up", DRIVER, "if preparing is None:", "if True:"),
    Mutant("wrong guesses stay planned", COMPLETION, "sequence.num_planned -= num_guesses - num_right", "pass"),
    Mutant("guesses are unsure for ever", COMPLETION, "sequence.num_unsure -= num_guesses", "pass"),
    Mutant("guesses are never unsure", PLANNER, "sequence.num_unsure += num_guesses", "pass"),
    Mutant(
        "one is preempted for a guess", PLANNER, "preempts = is_needed and not sequence.num_unsure", "preempts = True"
    ),
    Mutant("a search guesses", PLANNER, "if self._queue.focus is None else {}", "if True else {}", "def _guesses("),
    Mutant("guesses take no budget", PLANNER, "len(step.chunks) + num_guesses + len(forced)", "len(step.chunks)"),
    Mutant("a sequence that guesses decodes too", PLANNER, "if guesses and sequence.id in guesses:", "if False:"),
    Mutant("guesses go on under a grammar", GUESSES, "and sequence.request.grammar is None", ""),
    Mutant("guesses run past the end", GUESSES, "sequence.limit - 2 - sequence.num_planned", "self._most"),
    Mutant("padding is free", GUESSES, "sizes[above] if above < len(sizes) else size", "size"),
    Mutant("a step has any number of guesses", GUESSES, "found[: self._most_in_step]", "found"),
    Mutant("a sequence never tries again", GUESSES, "found.append((TRIAL_CHANCE, sequence))", "pass"),
    Mutant("a sequence always tries again", GUESSES, "len(sequence.tokens) + sequence.guessing.pause", "0"),
    Mutant("nothing is learnt", GUESSES, "guessing.chance += LAST_SHARE * (is_right - guessing.chance)", "pass"),
    Mutant("others' guesses say nothing", GUESSES, "self.chance += LAST_SHARE_OF_ALL", "_ = LAST_SHARE_OF_ALL"),
)


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


def copy_to(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def why_not_collected() -> str:
    """What keeps pytest from finding the tests without any fault, which would seem to kill every mutant; or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stdout + done.stderr


def run(mutant: Mutant) -> tuple[Mutant, str | None, float]:
    """Which test failed, None when none did; and how long that took."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_to(copy)
        target = copy / "quire" / mutant.path
        target.write_text(apply(mutant, target.read_text()))
        # python -m puts the working directory first on the path, so that the copy is what is imported.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "--tb=no",
            "-p",
            "tests.core.mutants",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--hypothesis-profile=mutants", "--show-capture=no"]
        command += TESTS if mutant.path.startswith("core") else reversed(TESTS)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return mutant, f"it did not end in {TIMEOUT_S} s", time.monotonic() - begun
    taken = time.monotonic() - begun
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise RuntimeError(f"{mutant.name}: the tests could not be run\n{done.stdout}\n{done.stderr}")
    return mutant, failed[0].split(" ")[1] if failed else None, taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only the mutants whose names hold this")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.only in mutant.name]
    if lines := outdated(chosen, ROOT / "quire"):
        print(*lines, f"{len(lines)} of {len(chosen)} mutants do not fit the source; mend or remove them", sep="\n")
        return 2
    if not chosen:
        print(f"no mutant has {asked.only!r} in its name")
        return 2
    if reason := why_not_collected():
        print(reason, "the tests cannot be run, even without a fault", sep="\n")
        return 2
    survivors = 0
    with ThreadPoolExecutor(asked.jobs) as workers:
        for mutant, killer, taken in workers.map(run, chosen):
            survivors += killer is None and not mutant.explanation
            verdict = f"killed by {killer}" if killer else f"SURVIVED {mutant.explanation or 'and nobody can say why'}"
            print(f"{mutant.name:<46} {taken:6.1f} s  {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} unexplained survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
