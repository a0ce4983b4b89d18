"""Checks the grammars of clients before the engine gets them."""

import asyncio
from collections.abc import Iterable

from quire.errors import DeadlineExceeded, invalid, time_limit
from quire.grammar.checking import GrammarChecking
from quire.grammar.limits import refuse_what_explodes
from quire.request import Grammar
from quire.server.observe.times import RequestTimes
from quire.server.offload import Offload
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar


class GrammarCheck:
    """Checks grammars without holding up the event loop, which owns it."""

    def __init__(self, offload: Offload, timeout_s: float | None = None) -> None:
        """`timeout_s`: of a request, from its arrival."""
        self._offload = offload
        self._timeout_s = timeout_s
        self.checking = GrammarChecking()

    async def check(self, specs: Iterable[GenerationSpec], times: RequestTimes) -> None:
        """Refuse grammars that cannot be followed, and a request that reaches its deadline before the check ends."""
        for grammar in dict.fromkeys(spec.unchecked_grammar for spec in specs):
            if grammar is None:
                continue
            try:
                async with asyncio.timeout(None if self._timeout_s is None else self._timeout_s - times.total_s):
                    await self._check(grammar)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{time_limit(self._timeout_s)} passed before {grammar.field} was checked"
                ) from error

    async def _check(self, named: NamedGrammar) -> None:
        # The check of the whole ends within the thinking, so the part that follows the thinking is checked by itself.
        if named.part is not None:
            await self._check(named.part)
        await self.refuse_what_cannot_be_followed(named.field, named.grammar)

    async def refuse_what_cannot_be_followed(self, name: str, grammar: Grammar) -> None:
        """Raise when `grammar`, the field `name`, is wrong or would cost too much."""
        if not self.checking.knows(grammar):
            await self._offload.run(len(grammar.text), lambda: refuse_what_explodes(name, grammar))
        fault = await asyncio.wrap_future(self.checking.submit(grammar))
        if fault is not None:
            raise invalid(name, f"cannot be followed: {fault}")
