"""Threads keep Python for a short time while programs are made beside steps."""

import sys
from concurrent.futures import Future
from threading import Event

import pytest

from quire.executor.programs.programs import SWITCH_S, switch_often_until
from tests.patience import WAIT_S


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_until_all_are_done_threads_switch_often(is_cancelled: bool) -> None:
    usual_s, told = sys.getswitchinterval(), Event()
    futures: list[Future[None]] = [Future(), Future()]
    switch_often_until(futures, told.set)
    try:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        futures[0].set_result(None)
        assert not told.wait(0.05)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        if is_cancelled:
            futures[1].cancel()
            futures[1].set_running_or_notify_cancel()
        else:
            futures[1].set_exception(RuntimeError("a program that cannot be made"))
    assert told.wait(WAIT_S)
    assert sys.getswitchinterval() == pytest.approx(usual_s)
