"""Faults in the pages, their groups, copies and the prefix cache."""

from tests.core.mutant import (
    CACHE,
    COMPLETION,
    LIMITS,
    POOL,
    PROMPTS,
    QUEUE,
    REACH,
    REQUESTS,
    RUNNING,
    SCHEDULER,
    SEQUENCE,
    TREE,
    Mutant,
)

PAGE_MUTANTS = (
    # Pages
    Mutant("page 0 is handed out", POOL, "list(range(num_pages - 1, 0, -1))", "list(range(num_pages - 1, -1, -1))"),
    Mutant("a taken page has no holder", POOL, "self._holders[page] = 1", "self._holders[page] = 0"),
    Mutant("taking gives what there is", POOL, "if count > len(free):", "if not free and count:"),
    Mutant(
        "double release goes unnoticed",
        POOL,
        "if count < 0:",
        "if count < -1:",
        within="def release",
    ),
    Mutant(
        "a page is free while it is held",
        POOL,
        "            elif not count:\n",
        "            else:\n",
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
        SEQUENCE,
        "self.plain_end = min(end, self.last_end)",
        "self.plain_end = min(end + 1, self.last_end)",
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
        "first_page(reach, sequence.num_computed,",
        "first_page(reach, sequence.num_computed + 1,",
    ),
    Mutant(
        "a window's page is given back before results",
        RUNNING,
        "first_page(reach, sequence.num_computed,",
        "first_page(reach, sequence.num_planned,",
    ),
    Mutant(
        "nothing is given back while a prompt is computed",
        RUNNING,
        "        self._give_back(sequence)\n        if self.saves is not None",
        "        if self.saves is not None",
    ),
    Mutant(
        "nothing is given back while a sequence decodes",
        RUNNING,
        "            self._give_back(sequence)\n        while",
        "            pass\n        while",
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
        "a sequence takes pages for one group", RUNNING, "num_pages * self._num_groups, preempts", "num_pages, preempts"
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
    Mutant(
        "a window has a position fewer",
        REACH,
        "return max(0, position - reach + 1)",
        "return max(0, position - reach + 2)",
    ),
    Mutant(
        "a window has a position more", REACH, "return max(0, position - reach + 1)", "return max(0, position - reach)"
    ),
    Mutant(
        "a chunk begins where a window would",
        REACH,
        "return position - position % reach.size",
        "return max(0, position - reach.size + 1)",
    ),
    Mutant(
        "a chunk begins after its first position",
        REACH,
        "return position - position % reach.size",
        "return position - max(0, position % reach.size - 1)",
    ),
    Mutant(
        "a prefix goes on without the first page of its window",
        CACHE,
        "needed = range(first_page(reach, count * page_size, page_size), count)",
        "needed = range(first_page(reach, count * page_size, page_size) + 1, count)",
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
    Mutant("copied pages stay held", RUNNING, "        cache.release(kept)\n", ""),
    Mutant(
        "a copied page is evicted for its copy",
        RUNNING,
        "        cache.hold(kept)\n",
        "",
        explanation="holds are released too: see above",
    ),
    Mutant(
        "what was copied is computed again",
        RUNNING,
        "* limits.page_size + match.num_partial_tokens",
        "* limits.page_size",
    ),
    Mutant(
        "a start without its copy is not tried",
        RUNNING,
        "match, max_tokens) if copied else None",
        "match, max_tokens) if 0 else None",
    ),
    Mutant(
        "all tokens of a prompt are copied",
        CACHE,
        "start : min(start + self._page_size, max_tokens)",
        "start : start + self._page_size",
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
        "            self._touch(node, num_pages)\n        elif path",
        "            pass\n        elif path",
    ),
    Mutant(
        "a parent forgets the use of its children",
        CACHE,
        "parent.last_used = max(parent.last_used, node.last_used)",
        "pass",
    ),
    Mutant("the tree does not hold its pages", CACHE, "self._pool.hold((page,))", "pass"),
    Mutant("the parent of the last child is not listed", CACHE, "self._list(node, self._is_full.index(True))", "pass"),
    Mutant("a prefix goes as a whole", CACHE, "if len(dropped) >= count or (dropped and", "if (dropped and"),
    Mutant(
        "a prefix goes before others that were used earlier",
        CACHE,
        "if len(dropped) >= count or (dropped and first is not None and first[0] <= end.last_used):",
        "if len(dropped) >= count:",
    ),
    Mutant("a page before a held one goes with those after it", CACHE, "end is not None and not end.pins", "end"),
    Mutant(
        "evicted pages are not free", CACHE, "        self._pool.release(dropped)\n\n    def drop", "\n    def drop"
    ),
    Mutant("an empty root stays", CACHE, "del self._roots[decoded(parent.key)]", "pass"),
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
    Mutant("parked sequences are forgotten", QUEUE, "            self.push(woken)", "            pass"),
    Mutant("an aborted one stays parked", QUEUE, "self._prefills.leave(sequence)", "pass"),
    Mutant("any number is parked", QUEUE, "if len(self._prefills) >= self._max_parked:", "if False:"),
    Mutant("nobody waits for a shared prefix", QUEUE, "if key in self._promises:", "if False:"),
    Mutant("those that waited stay marked", QUEUE, "self._parked.discard(sequence)\n                woken", "woken"),
    Mutant(
        "an aborted one that waited is back", QUEUE, "if sequence in self._parked:  # and has not ended", "if True:"
    ),
    Mutant("all wake with each page", QUEUE, "num_pages is None or waiting[0][0] <= num_pages", "True"),
    Mutant("those that need fewer pages wait on", QUEUE, "low, high = 1, min(", "low, high = 10**6, min("),
    Mutant(
        "pages behind what is shared count",
        QUEUE,
        "if is_same else (low, middle - 1)",
        "if True else (low, middle - 1)",
    ),
    Mutant(
        "those that wait look before the prompt's last pages are there",
        RUNNING,
        "None if is_last else sequence.published",
        "sequence.published if sequence.state is State.PREFILLING else None",
    ),
    Mutant("any number of tokens is compared", PROMPTS, "step.parked_tokens < MAX_PARKED_TOKENS and", ""),
    # Publication
    Mutant(
        "published before completion",
        RUNNING,
        "num_pages = sequence.num_shared // self._page_size",
        "num_pages = min(sequence.num_planned, len(sequence.tokens)) // self._page_size",
    ),
    Mutant(
        "an incomplete page is published",
        RUNNING,
        "num_pages = sequence.num_shared // self._page_size",
        "num_pages = -(-sequence.num_shared // self._page_size)",
    ),
    Mutant(
        "a prompt is never published while it runs",
        COMPLETION,
        "self._running.publish(sequence, is_last=chunk.samples)",
        "pass",
    ),
    Mutant("what ended is not published", RUNNING, "        if keep_pages:", "        if False:"),
    Mutant("the last token is not computed", SEQUENCE, "return self.prompt_end - 1", "return self.prompt_end"),
    Mutant("a lost device's pages stay cached", SCHEDULER, "self._running.cache.clear()", "pass"),
)
