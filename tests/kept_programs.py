"""The programs that one process of the tests has compiled, and that JAX forgets between files when they are many.

JAX keeps more than a megabyte of each, and looks through all of that when it lowers the next: with 2,000 of them, as a
worker had after a few minutes, the next one takes half as long again, and the worker has 4 GB.
"""

import sys

COMPILED = "/jax/core/compile/backend_compile_duration"
MOST = 500


class KeptPrograms:
    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        """Once the tests are collected: by then JAX is there if any of them needs it."""
        if "jax" in sys.modules:
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._note)

    def forget_many(self) -> None:
        if self.count > MOST:
            import jax

            jax.clear_caches()
            self.count = 0

    def _note(self, event: str, duration_s: float, **_: str | int) -> None:
        self.count += event == COMPILED
