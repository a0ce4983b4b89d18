"""Whether a client's grammar can be followed, found out before the engine hears of it."""

import asyncio

from quire.errors import InvalidRequest
from quire.grammar.checking import GrammarChecking
from quire.grammar.limits import refuse_what_explodes
from quire.request import Grammar
from quire.server.offload import Offload


class GrammarCheck:
    """Checks grammars without holding up the event loop, which owns it."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self.checking = GrammarChecking()

    async def refuse_what_cannot_be_followed(self, name: str, grammar: Grammar) -> None:
        """Raise when `grammar`, the field `name`, is wrong or would cost too much."""
        if not self.checking.knows(grammar):
            await self._offload.run(len(grammar.text), lambda: refuse_what_explodes(name, grammar))
        fault = await asyncio.wrap_future(self.checking.ask(grammar))
        if fault is not None:
            raise InvalidRequest.for_field(name, f"cannot be followed: {fault}")
