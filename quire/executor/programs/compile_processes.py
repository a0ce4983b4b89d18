"""Processes that make programs for an engine, so that its own is not kept from launching steps.

Tracing is Python's, and takes half a second for a program of a GPU; on a thread of the engine's process it would keep
Python from the thread that launches steps for so long. These processes fill the store, and the engine loads what is
kept. Whatever goes wrong there, the engine makes its programs itself.
"""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any

import quire
from quire.executor.programs.compile_worker import CompileTask, MakeResult
from quire.executor.programs.kinds import Key

log = logging.getLogger(__name__)

# The same modules as here, and none that happen to be in the working folder. Those of the standard library come first:
# the folder of this package may have others of the same names.
_BEGIN = """
import sys
places = [at for at, folder in enumerate(sys.path) if folder.endswith("-packages")]
sys.path.insert(min(places, default=len(sys.path)), sys.argv[1])
from quire.executor.programs.compile_worker import main
main()
"""
WORKER = (sys.executable, "-c", _BEGIN, str(Path(quire.__file__).parents[1]))
PROCESSORS_OF_ONE = 2  # while an engine serves
QUIET_S = 300.0  # without an answer from any process, after which none is waited for any more
MAX_FAILED = 3  # programs, after which none is asked for any more


class CompileProcesses:
    """Processes that make the `wanted` programs. They begin once, end when all are made or something fails, and do not
    begin again. Any thread may call.

    Every future in `_asked` gets its result: from an answer, or when the processes end.
    """

    def __init__(
        self,
        count: int,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = WORKER,
        shares_processors: bool = True,
    ) -> None:
        """`environment`: further variables of theirs. `shares_processors`: whether they share few while an engine
        serves."""
        self._count = count
        self._shares_processors = shares_processors
        self._command = command
        self._variables = {**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})}
        self._lock = Lock()  # of all that follows
        self._changed = Condition(self._lock)
        self._max_asked: int | None = None  # programs that are under way at a time
        self._task: bytes | None = None
        self._wanted: set[Key] = set()
        self._first: set[Key] = set()  # of them, which others wait for
        self._asked: dict[int, Future[bool]] = {}
        self._number = 0
        self._num_failed = 0
        self._heard_s = 0.0
        self._has_begun = self._is_over = False
        self._processes: list[_Process] = []

    @property
    def process_ids(self) -> list[int]:
        with self._lock:
            return [one.process.pid for one in self._processes]

    def start(self) -> None:
        """Begin ahead of the task: it takes a process seconds to load JAX."""
        with self._lock:
            if self._has_begun or self._is_over:
                return
            self._has_begun = True
            try:
                for _ in range(self._count):
                    self._processes.append(_Process(self._command, self._variables, self))
            except (OSError, TypeError) as error:  # the latter where Python does not know its own program
                reason = f"cannot be started: {error}"
            else:
                self._send_task()
                return
        self.give_up(reason)

    def begin(self, task: CompileTask) -> None:
        """Say what programs are made of. Once, before any is made."""
        with self._lock:
            self._task = pickle.dumps(task)
            self._send_task()

    def _send_task(self) -> None:
        for one in self._processes if self._task is not None else ():
            one.commands.put(self._task)

    def want(self, keys: Collection[Key], first: Collection[Key] = ()) -> None:
        """The programs that will be asked for; the `first` of them are made before the others. Without any the
        processes end, or do not begin."""
        self._wanted, self._first = set(keys), set(first)
        if keys:
            self.start()
        else:
            self.close()

    def slow_down(self) -> int | None:
        """From now on each process makes few programs at a time, and all of them may share few processors: the engine's
        steps need some too. Returns the number of programs that all make at a time; None where no process runs."""
        most = PROCESSORS_OF_ONE * self._count
        with self._lock:
            self._max_asked = most
            processes = list(self._processes)
        for one in processes if sys.platform == "linux" and self._shares_processors else ():
            one.confine(most)
        return most if processes else None

    def make(self, key: Key) -> bool:
        """Wait until a program is kept; False if it is not wanted, or not going to be kept."""
        with self._lock:
            if key not in self._wanted:
                return False
            while self._processes and self._must_wait(key):
                if not self._changed.wait(QUIET_S) and not self._asked:
                    return False  # nothing is under way that could end this
            if not self._processes:
                return False
            if not self._asked:
                self._heard_s = time.monotonic()  # no answer was due before
            self._number += 1
            future = self._asked[self._number] = Future()
            chosen = min(self._processes, key=lambda one: len(one.asked))
            chosen.asked[self._number] = key
            chosen.commands.put(pickle.dumps((self._number, key)))
        while True:
            try:
                return future.result(QUIET_S)
            except TimeoutError:
                if time.monotonic() - self._heard_s > QUIET_S:
                    self.give_up(f"have not answered for {QUIET_S:.0f} s")

    def _must_wait(self, key: Key) -> bool:
        if self._max_asked is not None and len(self._asked) >= self._max_asked:
            return True
        return key not in self._first and not self._first.isdisjoint(self._wanted)

    def give_up(self, reason: str) -> None:
        if self._end():
            log.warning("programs are compiled by threads, as the processes for it %s", reason)

    def close(self) -> None:
        """End the processes, whatever they are doing: their memory is free then."""
        self._end()

    def _end(self) -> bool:
        """Returns whether they had not ended before."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            ended, self._processes = self._processes, []
            asked, self._asked = self._asked, {}
            self._changed.notify_all()
        for one in ended:
            one.end()
        for future in asked.values():
            future.set_result(False)
        return not was_over

    def note(self, process: "_Process", result: MakeResult) -> None:
        with self._lock:
            self._heard_s = time.monotonic()
            future, key = self._asked.pop(result.number, None), process.asked.pop(result.number, None)
            self._num_failed += result.error is not None
            if key is not None:
                self._wanted.discard(key)
            self._changed.notify_all()
        log.debug("a process made %s in %.2f s: %s", key, result.seconds, result.error or "kept")
        if result.error is not None and (key is None or self._num_failed > MAX_FAILED):
            self.give_up(f"fail: {result.error}")
        elif result.error is not None:
            log.warning("a process could not make a program, which a thread compiles: %s: %s", key, result.error)
        if future is not None:
            future.set_result(result.error is None)
        if not self._wanted:
            self.close()


class _Process:
    """One thread writes to it, so that nothing waits for it to read; another reads."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], owner: CompileProcesses) -> None:
        self.asked: dict[int, Key] = {}
        self.commands: SimpleQueue[bytes | None] = SimpleQueue()
        # In a session of its own, so that an interrupt at the terminal is the engine's alone.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, start_new_session=True
        )
        self._owner = owner
        for target in (self._write, self._read):
            Thread(target=target, name="quire-compile-process", daemon=True).start()

    def end(self) -> None:
        self.process.kill()
        self.commands.put(None)

    def confine(self, num_processors: int) -> None:
        """Let all its threads, and those that they start, run on the last processors only."""
        processors = sorted(os.sched_getaffinity(0))[-num_processors:]
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread), processors)

    def _write(self) -> None:
        pipe: Any = self.process.stdin
        try:
            while (message := self.commands.get()) is not None:
                pipe.write(message)
                pipe.flush()
            pipe.close()
        except OSError:
            pass  # it has ended, as the other thread knows

    def _read(self) -> None:
        pipe: Any = self.process.stdout
        try:
            while True:
                self._owner.note(self, pickle.load(pipe))
        except Exception:  # of any kind: its end, or something that is no answer
            pipe.close()
            self.process.kill()
            status = self.process.wait()
            self._owner.give_up(f"have ended with status {status}")
