"""Faults in what is exchanged with other engines and files."""

from tests.core.mutant import Mutant

EXCHANGE, REQUESTS = "core/prefix_exchange.py", "core/requests.py"

EXCHANGE_MUTANTS = (
    Mutant("exchange: all of the host is room for a prompt", EXCHANGE, "num_usable // 2", "num_usable"),
    Mutant(
        "exchange: there is room without a host",
        EXCHANGE,
        "return 0 if self._running.host",
        "return 1 if self._running.host",
    ),
    Mutant(
        "exchange: the last token counts as cached",
        EXCHANGE,
        "(len(request.prompt) - 1) // self",
        "len(request.prompt) // self",
    ),
    Mutant("exchange: pages of the host do not count", EXCHANGE, "if host is None or count >= most:", "if True:"),
    Mutant("exchange: one group is enough", EXCHANGE, "while count < most and all(", "while count < most and any("),
    Mutant(
        "exchange: pages of the host count without those before them",
        EXCHANGE,
        "while count < most and all(",
        "while count < most and not all(",
    ),
    Mutant(
        "exchange: the first page stands for all",
        EXCHANGE,
        "host.find(digests[count], group)",
        "host.find(digests[0], group)",
    ),
    Mutant(
        "exchange: names have the number of an adapter",
        EXCHANGE,
        "self._requests.salt_with(request, adapter_digest), len",
        "self._requests.salt_of(request), len",
    ),
    Mutant(
        "exchange: names have no adapter",
        EXCHANGE,
        "self._requests.salt_with(request, adapter_digest), len",
        'self._requests.salt_with(request, ""), len',
    ),
    Mutant(
        "exchange: a part of a page has a name",
        EXCHANGE,
        "len(request.prompt) // self._page_size\n        return prefix_digests(salt, request.prompt",
        "-(-len(request.prompt) // self._page_size)\n        return prefix_digests(salt, request.prompt",
    ),
    Mutant("exchange: what was not found ends before it begins", EXCHANGE, "end = max(first, end)", "pass"),
    Mutant(
        "exchange: pages before a window are found",
        EXCHANGE,
        "tuple(max(first, table.count(0)) for table in tables)",
        "tuple(first for table in tables)",
    ),
    Mutant(
        "exchange: pages are found that were not asked for",
        EXCHANGE,
        "tuple(max(first, table.count(0)) for table in tables)",
        "tuple(table.count(0) for table in tables)",
    ),
    Mutant(
        "exchange: pages are read that were evicted", EXCHANGE, "if found_end == end else None", "if found else None"
    ),
    Mutant(
        "exchange: pages are those of the whole prompt",
        EXCHANGE,
        "self._tables(request, end * self._page_size)",
        "self._tables(request, len(request.prompt))",
    ),
    Mutant(
        "exchange: a page of another group is read",
        EXCHANGE,
        "[tables[group][index] for index, group in rows]",
        "[tables[0][index] for index, group in rows]",
    ),
    Mutant(
        "exchange: another page is read",
        EXCHANGE,
        "[tables[group][index] for index, group in rows]",
        "[tables[group][at] for at, (_, group) in enumerate(rows)]",
    ),
    Mutant(
        "exchange: salts share pages that are read",
        EXCHANGE,
        "match = cache.match(self._requests.salt_of(request)",
        'match = cache.match("0+"',
    ),
    Mutant("exchange: pages are reserved without a host", EXCHANGE, "if host is None or not rows:", "if not rows:"),
    Mutant("exchange: no rows have a last one", EXCHANGE, "if host is None or not rows:", "if host is None:"),
    Mutant("exchange: the last row has no name", EXCHANGE, "most = 1 + max(index", "most = max(index"),
    Mutant(
        "exchange: pages are entered under the names of others",
        EXCHANGE,
        "host.reserve((digests[index], group))",
        "host.reserve((digests[-1 - index], group))",
    ),
    Mutant(
        "exchange: pages are entered for another group",
        EXCHANGE,
        "host.reserve((digests[index], group))",
        "host.reserve((digests[index], 0))",
    ),
    Mutant(
        "exchange: salts share pages that come",
        EXCHANGE,
        "prefix_digests(self._requests.salt_of(request), request.prompt",
        'prefix_digests("0+", request.prompt',
    ),
    Mutant(
        "exchange: a row that gets no page moves the others",
        EXCHANGE,
        "reserved.append((place, page))",
        "reserved.append((len(reserved), page))",
    ),
    Mutant(
        "exchange: pages that are there count as a lack of room",
        EXCHANGE,
        "elif not host.has((digests[index], group)):",
        "else:",
    ),
    Mutant(
        "exchange: a lack of room is not told",
        EXCHANGE,
        "return None if is_full and not reserved else reserved",
        "return reserved",
    ),
    Mutant(
        "exchange: a lack of room for some counts as one for all",
        EXCHANGE,
        "return None if is_full and not reserved else reserved",
        "return None if is_full else reserved",
    ),
    Mutant(
        "exchange: what was written is given up",
        EXCHANGE,
        "self._running.host.confirm(reserved)",
        "self._running.host.abandon(reserved)",
    ),
    Mutant(
        "exchange: what could not be written counts",
        EXCHANGE,
        "self._running.host.abandon(reserved)",
        "self._running.host.confirm(reserved)",
    ),
    Mutant("exchange: what could not be written stays held", EXCHANGE, "self._running.host.abandon(reserved)", "pass"),
    Mutant(
        "exchange: adapters share pages",
        REQUESTS,
        'self.salt_with(request, str(adapter) if adapter else "")',
        'self.salt_with(request, "")',
    ),
    Mutant("exchange: the salt of a request is not in its names", REQUESTS, 'f"{key}+{request.salt}"', 'f"{key}+"'),
    Mutant(
        "exchange: prompts whose positions differ share pages",
        REQUESTS,
        "0 if self._prefix_key is None else",
        "0 if True else",
    ),
)
