"""The time for which one thread may keep Python from the others."""

import sys
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

SWITCH_S = 0.0001  # for which a thread that traces a program may keep Python from the one that launches steps


def switch_often_until(futures: Collection[Future[Any]], then: Callable[[], None]) -> None:
    """Until these are done, no thread keeps Python for long. `then` is called afterwards, on a thread that waits for
    nothing else: those that make programs may all be needed for the last of them."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)

    def finish() -> None:
        wait(futures)
        sys.setswitchinterval(usual_s)
        then()

    Thread(target=finish, name="quire-compiled", daemon=True).start()
