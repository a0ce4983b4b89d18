"""Requests whose answers can be worked out by hand, and clients in the background that check them."""

import asyncio
import os
import signal
import threading
from typing import Any

from quire.request import Request, SamplingParams
from tests.chaos.clients import Heard, stream_all
from tests.chaos.server import Server, wait_until
from tests.fake_executor import expected_tokens
from tests.server.vocabulary import tokenizer

TOKENIZER = tokenizer()


def body(number: int, max_tokens: int = 60, **fields: Any) -> dict[str, Any]:
    prompt = "abcdefghij"[: 1 + number % 7] + "klmnopqrstuvwxyz"[number % 16]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": number % 2, "seed": number} | fields


def expected(asked: dict[str, Any]) -> list[str]:
    """What each choice says."""
    request = Request(
        0,
        tuple(TOKENIZER.encode(asked["prompt"])),
        asked["max_tokens"],
        SamplingParams(temperature=float(asked["temperature"])),
        seed=asked["seed"],
        samples=asked.get("n", 1),
    )
    texts = [TOKENIZER.decode(expected_tokens(request, sample)) for sample in range(request.samples)]
    stop = asked.get("stop")
    return [text if stop is None else text.split(stop)[0] for text in texts]


class Asking:
    """Clients that ask in the background."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self.bodies = bodies
        self.heard = [Heard() for _ in bodies]
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()

    def _run(self, server: Server) -> None:
        asyncio.run(stream_all(server.url, self.bodies, self.heard))

    @classmethod
    def at_once(cls, server: Server, bodies: list[dict[str, Any]]) -> "Asking":
        """The engine stands still until all have come."""
        (engine,), before = server.processes("quire-engine"), server.num_arrived()
        os.kill(engine, signal.SIGSTOP)
        asking = cls(server, bodies)
        wait_until(lambda: server.num_arrived() == before + len(bodies))
        os.kill(engine, signal.SIGCONT)
        return asking

    def wait_for_text(self) -> None:
        """Until more has come than there is now."""
        before = self._num_characters()
        wait_until(lambda: self._num_characters() > before)

    def _num_characters(self) -> int:
        return sum(len(text) for heard in self.heard for text in heard.texts)

    def wait(self) -> "Asking":
        self._thread.join()
        return self

    def check_all(self) -> None:
        for asked, heard in zip(self.bodies, self.heard, strict=True):
            assert heard.error is None, heard.error
            assert not heard.was_cut, f"the connection ended after {heard.texts}"
            assert heard.texts == expected(asked), f"{asked}: {heard.texts}, not {expected(asked)}"
            assert heard.is_complete
