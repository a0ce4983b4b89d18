"""Checks that grammars can be followed, in a process where compiling them can be stopped."""

import json
import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from queue import SimpleQueue

from quire.errors import EngineFailed, Overloaded, invalid
from quire.grammar.limits import refuse_what_explodes
from quire.request import Grammar, GrammarKind

log = logging.getLogger(__name__)

MAX_KNOWN = 1024  # verdicts kept
MAX_KNOWN_BYTES = 16 * 2**20  # of the grammars they are about
MAX_WAITING = 64  # different grammars
RETRY_S = 1.0

Verdict = Future[str | None]  # why a grammar cannot be followed; None when it can


class GrammarChecking:
    """Sends grammars to a process, quire.grammar.checker, which is started with the first of them.

    Equal grammars that are submitted together are sent once. Every grammar without a verdict is in `_pending`, wanted
    or not: the process works on it all the same. Any thread may submit; one thread writes to the process, and one
    reads from it.
    """

    def __init__(self) -> None:
        self.num_submitted = 0  # grammars sent to the process
        self._lock = threading.Lock()  # of all that follows
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()
        self._known_bytes = 0
        self._pending: dict[Grammar, Verdict] = {}
        self._sent: dict[int, tuple[Grammar, subprocess.Popen[bytes]]] = {}  # by the number of the question
        self._questions: SimpleQueue[tuple[int, Grammar] | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def knows(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._known

    def submit(self, grammar: Grammar) -> Verdict:
        """Raises when too many grammars wait. The verdict cannot be cancelled: others may share it."""
        with self._lock:
            pending = self._pending.get(grammar)
            if pending is not None:
                return pending
            verdict: Verdict = Future()
            verdict.set_running_or_notify_cancel()
            if grammar in self._known:
                self._known.move_to_end(grammar)
                verdict.set_result(self._known[grammar])
                return verdict
            if len(self._pending) >= MAX_WAITING:
                raise Overloaded(
                    f"{len(self._pending)} grammars wait to be checked; the limit is {MAX_WAITING}", RETRY_S
                )
            self._pending[grammar] = verdict
            self.num_submitted += 1
            self._questions.put((self.num_submitted, grammar))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="quire-grammar-check", daemon=True)
                self._writer.start()
        return verdict

    def refuse(self, name: str, grammar: Grammar) -> None:
        """Raise when `grammar`, the field `name`, is wrong or would cost too much. Waits for the process.

        Rules are not sent: they may name tokens of the model, which the process does not know.
        """
        refuse_what_explodes(name, grammar)
        names_tokens = grammar.kind in (GrammarKind.LARK, GrammarKind.TOKENS)
        fault = None if names_tokens else self.submit(grammar).result()
        if fault is not None:
            raise invalid(name, f"cannot be followed: {fault}")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            process = self._process
        self._questions.put(None)
        if process is not None:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Assert the invariant."""
        with self._lock:
            assert self._known_bytes == sum(len(grammar.text) for grammar in self._known)
            assert not self._pending.keys() & self._known.keys()
            assert {grammar for grammar, _ in self._sent.values()} <= self._pending.keys()

    # The thread that writes

    def _write_all(self) -> None:
        while (question := self._questions.get()) is not None:
            number, grammar = question
            message = {"id": number, "kind": str(grammar.kind), "text": grammar.text}
            line = json.dumps(message).encode() + b"\n"
            try:
                process = self._started()
                assert process.stdin is not None, "it was started with a pipe"
                with self._lock:
                    self._sent[number] = grammar, process
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                self._fail(grammar, f"the process that checks grammars cannot be reached: {error}")

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None:
            command = (sys.executable, "-m", "quire.grammar.checker")
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            with self._lock:
                self._process = process
                if self._is_closed:
                    process.kill()
            threading.Thread(target=self._read_all, args=(process,), daemon=True).start()
        return process

    # The thread that reads

    def _read_all(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        for line in process.stdout:
            answer = json.loads(line)
            with self._lock:
                found = self._sent.pop(answer["id"], None)
            if found is not None:
                self._remember(found[0], answer["error"])
        process.wait()
        if not self._is_closed:
            log.error("the process that checks grammars has ended, with status %s", process.returncode)
        with self._lock:
            left = [(number, grammar) for number, (grammar, asked) in self._sent.items() if asked is process]
            for number, _ in left:
                del self._sent[number]
        for _, grammar in left:
            self._fail(grammar, "the process that checks grammars has ended")

    # Both

    def _remember(self, grammar: Grammar, fault: str | None) -> None:
        with self._lock:
            verdict = self._pending.pop(grammar)
            self._known[grammar] = fault
            self._known_bytes += len(grammar.text)
            while len(self._known) > MAX_KNOWN or (self._known_bytes > MAX_KNOWN_BYTES and len(self._known) > 1):
                forgotten, _ = self._known.popitem(last=False)
                self._known_bytes -= len(forgotten.text)
        verdict.set_result(fault)

    def _fail(self, grammar: Grammar, why: str) -> None:
        with self._lock:
            verdict = self._pending.pop(grammar, None)  # the thread that reads may have been first
            self._sent = {number: sent for number, sent in self._sent.items() if sent[0] != grammar}
        if verdict is not None:
            verdict.set_exception(EngineFailed(why, RETRY_S))
