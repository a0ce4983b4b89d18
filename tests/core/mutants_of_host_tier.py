"""Faults in the tier of host memory."""

from tests.core.mutant import (
    CACHE,
    COMPLETION,
    PLANNER,
    PROMPTS,
    RUNNING,
    SCHEDULER,
    SEQUENCE,
    STEP_BUILDER,
    TREE,
    Mutant,
)

HOST, RESTORE, RESTORES = "core/host_tier.py", "core/restore.py", "core/restores.py"

HOST_TIER_MUTANTS = (
    Mutant("nothing is saved", CACHE, "if self._host is not None:", "if False:", within="def _evict_end"),
    Mutant("pages of windows are not saved", CACHE, "self._host.save(node, (group,))", "pass"),
    Mutant("only one group of a node is saved", CACHE, "self._host.save(end, groups)", "self._host.save(end, (0,))"),
    Mutant(
        "a page has the digest of the next", CACHE, "= digests[index]", "= digests[min(index + 1, len(digests) - 1)]"
    ),
    Mutant(
        "a page can be read before its copy is confirmed",
        HOST,
        "found if found is not None and found.is_ready else None",
        "found",
    ),
    Mutant("a page that is saved is never ready", HOST, "one.is_ready = True", "pass"),
    Mutant(
        "a page that is being written is not held",
        HOST,
        "        self._pool.hold(pages)\n        reserved",
        "        reserved",
    ),
    Mutant("a page that is held is overwritten", HOST, "if one.is_ready and self._is_idle(one)", "if one.is_ready"),
    Mutant("a page that is being written is overwritten", HOST, "if one.is_ready and self._is_idle(one)", "if True"),
    Mutant(
        "the most recently used gives way",
        HOST,
        "for one in self._pages.values() if one.is_ready",
        "for one in reversed(self._pages.values()) if one.is_ready",
    ),
    Mutant("saves have no limit", HOST, "if len(self._copies) < self._max_saves else None", "if True else None"),
    Mutant("a page is saved twice", HOST, "            if key in self._pages:", "            if False:"),
    Mutant("what is saved again is not used", HOST, "self._pages.move_to_end(key)", "pass"),
    Mutant("what is read is not used", HOST, "self._pages.move_to_end(one.key)", "pass"),
    Mutant("the end of a prefix is used last", HOST, "for one in reversed(held):", "for one in held:"),
    Mutant(
        "saves stay for the next plan too",
        HOST,
        "self._copies, self._saving = [], []",
        "self._saving = []",
        within="taken =",
    ),
    Mutant(
        "an abandoned page stays",
        HOST,
        "            self._forget(one)\n            self._pool.release((one.page,))",
        "            self._pool.release((one.page,))",
    ),
    Mutant(
        "an abandoned page stays held",
        HOST,
        "            self._forget(one)\n            self._pool.release((one.page,))",
        "            self._forget(one)",
    ),
    Mutant("pages of a failed step are trusted", RESTORES, "host.distrust(restoring.pages)", "pass"),
    Mutant("pages of a failed step stay held", RESTORES, "        host.release(restoring.pages)", "        pass"),
    Mutant("copies of a failed step count", RESTORES, "host.abandon(moves.saved)", "host.confirm(moves.saved)"),
    Mutant(
        "copies that were not planned yet count after a fault",
        RUNNING,
        "self.host.abandon(self.host.take_saves()[1])",
        "pass",
    ),
    Mutant(
        "steps under way keep their pages after a fault",
        SCHEDULER,
        "self._running.abandon_moves(step.moves for step in self._in_flight)",
        "self._running.abandon_moves([])",
    ),
    Mutant("the salt is not in a digest", TREE, "return blake2b(salt, digest_size", 'return blake2b(b"", digest_size'),
    Mutant("a digest has the last page alone", TREE, "blake2b(before + key, digest_size", "blake2b(key, digest_size"),
    Mutant(
        "a node's digest is that of its parent",
        TREE,
        "digest = node.known_digest = digest_after(digest, node.key)",
        "node.known_digest = digest",
    ),
    Mutant(
        "digests are of other pages", HOST, "page_keys(tokens, len(known), num_pages", "page_keys(tokens, 0, num_pages"
    ),
    Mutant(
        "the last token is restored too",
        RESTORES,
        "max_pages = sequence.num_reusable // self._page_size",
        "max_pages = len(sequence.tokens) // self._page_size",
    ),
    Mutant("the host has no windows", RESTORES, "max(first, self._first_needed(group, end))", "first"),
    Mutant(
        "a window's first page is not restored",
        RESTORES,
        "max(first, self._first_needed(group, end)) for",
        "min(end, 1 + max(first, self._first_needed(group, end))) for",
    ),
    Mutant(
        "a prefix goes on where a group has a hole",
        RESTORES,
        "is None:\n                    break",
        "is None:\n                    page = 0",
    ),
    Mutant(
        "a prefix that ends early is not looked at again",
        RESTORES,
        "            end = reached\n",
        "            break\n",
    ),
    Mutant(
        "pages of the device are copied again",
        RESTORES,
        "path[index].pages[group] if index < len(path) else 0",
        "0",
    ),
    Mutant("host pages that will be read are not held", RUNNING, "self.host.hold(host_pages(restore.rows))", "pass"),
    Mutant(
        "host pages stay held when a restore ends early", RUNNING, "self.host.release(host_pages(restore.rows))", "pass"
    ),
    Mutant(
        "device pages stay held when a restore ends early",
        RUNNING,
        "self.cache.release(restore.device_pages())",
        "pass",
    ),
    Mutant(
        "device pages of a restore are not held",
        RUNNING,
        "matched += [] if restore is None else restore.device_pages()",
        "pass",
    ),
    Mutant(
        "a restore that stops is not ended",
        RUNNING,
        "if sequence.restore is not None:\n            self._end_restore",
        "if False:\n            self._end_restore",
    ),
    Mutant("restored positions are computed too", RUNNING, "sequence.num_planned += count * self._page_size", "pass"),
    Mutant("a row is restored twice", RUNNING, "del restore.rows[:count]", "del restore.rows[: count - 1]"),
    Mutant(
        "a restore goes on without an end",
        RUNNING,
        "            sequence.restore = None\n        return",
        "            pass\n        return",
    ),
    Mutant(
        "what is behind a window counts as held",
        RUNNING,
        "sequence.first_held[group] = first_page(reach, sequence.restore_end,",
        "sequence.first_held[group] = first_page(reach, 0 * sequence.restore_end,",
    ),
    Mutant(
        "restores have no limit", STEP_BUILDER, "self.restores_left = max(0, self.restores_left - len(copies))", "pass"
    ),
    Mutant("copies from the host are not planned", STEP_BUILDER, "self.copies += copies", "pass"),
    Mutant("copies from the host are not confirmed", STEP_BUILDER, "self.restored.append(restoring)", "pass"),
    Mutant(
        "the first row waits for room that never comes", RESTORE, "not (at_least_one and num_copies == most)", "True"
    ),
    Mutant("pages are saved after they were overwritten", PLANNER, "(*saves, *step.copies)", "(*step.copies, *saves)"),
    Mutant(
        "a step that copies and computes nothing is not planned",
        PLANNER,
        "if not step.chunks and not step.restored:",
        "if not step.chunks:",
    ),
    Mutant(
        "a sequence computes before it is restored",
        PROMPTS,
        "if has_pages and sequence.restore is None and",
        "if has_pages and",
    ),
    Mutant(
        "steps in which sequences decode restore as others do",
        PLANNER,
        "self._budget.restores(bool(step.chunks))",
        "self._budget.restores(False)",
    ),
    Mutant(
        "all steps restore as those in which sequences decode",
        PLANNER,
        "self._budget.restores(bool(step.chunks))",
        "self._budget.restores(True)",
    ),
    Mutant("others wait for pages from the host", PROMPTS, "and not waits and not", "and not"),
    Mutant(
        "a sequence that runs by itself does not compute while pages come",
        PROMPTS,
        "self._limits.restores_ahead and step.computes",
        "self._limits.restores_ahead",
    ),
    Mutant(
        "long prompts wait for pages from the host",
        STEP_BUILDER,
        "bool(self.chunks) or self.longest is not None or self.last is not None",
        "bool(self.chunks) or self.last is not None",
    ),
    Mutant(
        "short prompts wait for pages from the host",
        STEP_BUILDER,
        "bool(self.chunks) or self.longest is not None or self.last is not None",
        "bool(self.chunks) or self.longest is not None",
    ),
    Mutant(
        "a sequence that starts preempts others",
        PROMPTS,
        "self._continue_prefill(step, sequence, preempts=False)",
        "self._continue_prefill(step, sequence)",
        explanation="because a start has made sure of all pages of the known tokens",
    ),
    Mutant("a slot starts with a part of its pages", PROMPTS, "num_pages if sequence.is_started else 0", "num_pages"),
    Mutant(
        "restored tokens are not counted as cached",
        PROMPTS,
        "sequence.cached_tokens = sequence.num_planned",
        "sequence.cached_tokens = sequence.num_computed",
    ),
    Mutant("a slot starts again with every chunk", PROMPTS, "sequence.is_started = True", "pass"),
    Mutant(
        "a slot does not start again after a preemption",
        SEQUENCE,
        "        self.is_started = False\n        self.restore_end",
        "        self.restore_end",
    ),
    Mutant("pages count on the host without a result", COMPLETION, "host.confirm(moves.saved)", "pass"),
    Mutant("host pages that were read stay held", COMPLETION, "host.release(pages)", "pass"),
    Mutant("restored positions are not confirmed", COMPLETION, "sequence.num_computed = end", "pass"),
    Mutant("a late restore is taken", COMPLETION, "if epoch == sequence.epoch:", "if True:"),
    Mutant(
        "restored pages are not shared",
        COMPLETION,
        "                self._running.publish(sequence)\n\n    def _apply_decodes",
        "                pass\n\n    def _apply_decodes",
    ),
)
