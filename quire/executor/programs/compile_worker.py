"""A process that makes programs for an engine: it traces and compiles them, and keeps them in the engine's store.

`compile_processes.py` starts it. A `CompileTask` comes by standard input, then numbers and keys of programs, one pickle
each; results leave by standard output. It ends when its input does, whatever it is doing, as it does when the engine is
killed.
"""

import os
import pickle
import sys
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import jax

from quire.executor.draft.draft import Draft
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key
from quire.executor.programs.store import ProgramStore
from quire.executor.shapes import Shapes
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.native import library

LOWER_PRIORITY = 10  # than the engine's, whose steps go on meanwhile


class MakeResult(NamedTuple):
    number: int  # of the program that was asked for
    seconds: float = 0.0  # that it took, with the time that others were traced in
    error: str | None = None  # None when it is kept


class CompileTask(NamedTuple):
    """All that programs follow from. Models are built again: they have functions, which cannot travel."""

    model: tuple[Mapping[str, Any], ParamTree]  # its config, and the structure of its weights
    draft: tuple[Mapping[str, Any], ParamTree] | None  # the model that guesses
    shapes: Shapes
    store: tuple[Path, str]  # its folder, and the identity of the programs
    digest: str  # of the store, which differs where this process would compile something else
    threads: int
    native_library: Path | None  # the folder that operations for CPUs are in
    settings: Mapping[str, Any]  # of JAX

    def compiler(self) -> Compiler:
        for name, value in self.settings.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
        if self.native_library is not None:
            library.load(self.native_library)
        store = ProgramStore(*self.store)
        if store.digest != self.digest:
            raise RuntimeError(f"it has other devices than the engine: {jax.devices()}")
        config, weights = self.model
        draft = None if self.draft is None else Draft(build_model(self.draft[0]), self.draft[1])
        compiler = Compiler(build_model(config), weights, self.shapes, None, store, draft)
        compiler.share_timings()
        return compiler


def structure(weights: ParamTree) -> ParamTree:
    """The shapes and types of weights, which programs depend on."""
    like: ParamTree = jax.eval_shape(lambda: weights)
    return like


class ResultPipe:
    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._lock = Lock()

    def send(self, result: MakeResult) -> None:
        with self._lock:
            pickle.dump(result, self._output)
            self._output.flush()


def make(compiler: Compiler, number: int, key: Key, results: ResultPipe) -> None:
    begun_s, error = time.monotonic(), None
    try:
        compiler.make(key)
        if not compiler.is_kept(key):
            error = "it cannot be kept on disk"
    except Exception as caught:  # the engine tries it itself
        error = repr(caught)
    results.send(MakeResult(number, time.monotonic() - begun_s, error))


def work(commands: BinaryIO, results: ResultPipe) -> None:
    jax.devices()  # takes a second on a GPU, in which the engine measures its memory
    task = pickle.load(commands)
    compiler, pool = task.compiler(), ThreadPoolExecutor(task.threads)
    while True:
        number, key = pickle.load(commands)
        pool.submit(make, compiler, number, key, results)


def main() -> None:
    os.nice(LOWER_PRIORITY)
    warnings.simplefilter("ignore")  # the engine has them too
    results = ResultPipe(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what others print
    try:
        work(sys.stdin.buffer, results)
    except EOFError:
        pass  # the engine has ended, or needs no more
    except Exception as caught:  # no device, or other ones; the engine does without this process
        results.send(MakeResult(-1, error=repr(caught)))
    finally:
        os._exit(0)  # whatever is under way
