"""Compiles grammars that are not trusted, where they can be stopped: python -m quire.grammar.checker

Lines of JSON come in, {"id", "kind", "text"}, and go out, {"id", "error"}. The cost of a grammar cannot be predicted
from its text, and a thread that compiles one cannot be stopped. So each is compiled by its own child process, which is
bounded in processor time and memory and killed when it takes more.
"""

import contextlib
import json
import os
import random
import resource
import select
import signal
import time
from typing import Any

import llguidance

from quire.errors import InvalidRequest
from quire.grammar.matcher import compile_grammar, fault_in
from quire.request import Grammar, GrammarKind

MAX_CPU_S = 1
MAX_WALL_S = 60.0  # for one that does not compute; on a busy machine a second of processor time takes long
MAX_MEMORY_BYTES = 512 * 2**20  # of addresses, a third of which any child begins with
MAX_CHILDREN = 4
POLL_S = 0.005
NUM_TOKENS = 8  # that are tried after the beginning
TOO_COMPLEX = f"too complex: compiling it took more than {MAX_CPU_S} s of processor time, or too much memory"


def fault_of(grammar: Grammar, tokens: llguidance.LLTokenizer) -> str | None:
    """The reason why `grammar` cannot be followed; None if it can."""
    try:
        matcher = compile_grammar(grammar, tokens)
    except InvalidRequest as error:
        return error.message
    chance = random.Random(0)
    for _ in range(NUM_TOKENS):
        fault = fault_in(matcher)
        if fault is not None:
            return fault
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(tokens.vocab_size) if mask >> token & 1 and token != tokens.eos_token]
        if not allowed or matcher.is_stopped():
            return None
        matcher.consume_token(chance.choice(allowed))
    return None


class Checker:
    """Answers each line, in the order in which the children end."""

    def __init__(self) -> None:
        # Bytes are tokens enough: what explodes does so before the vocabulary matters.
        self._tokens = llguidance.LLTokenizer("byte")
        self._children: dict[int, tuple[int, float]] = {}  # by process: the id of its line, and its deadline
        self._held = b""

    def run(self) -> None:
        """Run until the input ends."""
        fault_of(Grammar(GrammarKind.REGEX, "a"), self._tokens)  # children inherit the loaded modules
        while True:
            waits = POLL_S if self._children else None
            has_room = len(self._children) < MAX_CHILDREN
            if has_room and b"\n" in self._held:
                line, self._held = self._held.split(b"\n", maxsplit=1)
                self._begin(json.loads(line))
            elif not has_room:
                time.sleep(POLL_S)
            elif select.select([0], [], [], waits)[0]:
                data = os.read(0, 1 << 20)
                if not data:
                    break
                self._held += data
            self._reap()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _begin(self, message: dict[str, Any]) -> None:
        pid = os.fork()
        if pid:
            self._children[pid] = message["id"], time.monotonic() + MAX_WALL_S
            return
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            grammar = Grammar(GrammarKind(message["kind"]), message["text"])
            _write(message["id"], fault_of(grammar, self._tokens))
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for pid, (number, until_s) in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                if status:
                    _write(number, TOO_COMPLEX)
            elif time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)


def answer_line(number: int, error: str | None) -> bytes:
    """An answer shorter than a pipe's atomic write: an error repeats the grammar, and escapes are long."""
    shown = None if error is None else error[:500]
    return json.dumps({"id": number, "error": shown}, ensure_ascii=False).encode(errors="replace") + b"\n"


def _write(number: int, error: str | None) -> None:
    """Write an answer in one call, so that answers of children do not interleave."""
    with contextlib.suppress(BrokenPipeError):  # the parent was killed, and the input ends next
        os.write(1, answer_line(number, error))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal; the parent ends this process
    os.nice(10)  # serving comes first
    Checker().run()
