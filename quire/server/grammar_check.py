"""Whether a client's grammar can be followed, found out before the engine hears of it."""

import asyncio
import json
import logging
import sys
from collections import OrderedDict

from quire.errors import EngineFailed, InvalidRequest, Overloaded
from quire.request import Grammar
from quire.text.grammar_limits import refuse_what_explodes

log = logging.getLogger(__name__)

MAX_KNOWN = 1024  # verdicts kept
MAX_KNOWN_BYTES = 16 * 2**20  # of the grammars they are about
MAX_WAITING = 64
RETRY_S = 1.0


class GrammarCheck:
    """Asks a process that compiles grammars where they can be stopped; it is started when the first grammar comes.

    Every grammar that waits for its verdict is in `_waiting`. Owned by the event loop.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # why it cannot be followed
        self._known_bytes = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._count = 0

    async def refuse_what_cannot_be_followed(self, name: str, grammar: Grammar) -> None:
        """Raise when `grammar`, the field `name`, is wrong or would cost too much."""
        if grammar not in self._known:
            refuse_what_explodes(name, grammar)
            self._remember(grammar, await self._ask(grammar))
        self._known.move_to_end(grammar)
        fault = self._known[grammar]
        if fault is not None:
            raise InvalidRequest(f"{name} cannot be followed: {fault}")

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _remember(self, grammar: Grammar, fault: str | None) -> None:
        self._known[grammar] = fault
        self._known_bytes += len(grammar.text)
        while len(self._known) > MAX_KNOWN or (self._known_bytes > MAX_KNOWN_BYTES and len(self._known) > 1):
            forgotten, _ = self._known.popitem(last=False)
            self._known_bytes -= len(forgotten.text)

    async def _ask(self, grammar: Grammar) -> str | None:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{len(self._waiting)} grammars wait to be checked; the limit is {MAX_WAITING}", RETRY_S)
        self._count += 1
        number = self._count
        verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = verdict
        try:
            async with self._starting:
                process = await self._started()
            assert process.stdin is not None, "it was started with a pipe"
            message = {"id": number, "kind": str(grammar.kind), "text": grammar.text}
            process.stdin.write(json.dumps(message).encode() + b"\n")
            return await verdict
        finally:
            self._waiting.pop(number, None)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", "quire.text.grammar_checker")
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            self._reading = asyncio.create_task(self._read(self._process))
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        while line := await process.stdout.readline():
            answer = json.loads(line)
            verdict = self._waiting.get(answer["id"])
            if verdict is not None and not verdict.done():
                verdict.set_result(answer["error"])
        await process.wait()
        log.error("the process that checks grammars has ended, with status %s", process.returncode)
        for verdict in self._waiting.values():
            if not verdict.done():
                verdict.set_exception(EngineFailed("the process that checks grammars has ended", RETRY_S))
