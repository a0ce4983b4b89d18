"""An engine whose steps are computed by several processes: a failed step ends it, after the loss of a process."""

import queue
import time

import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.group import GroupFaults
from quire.errors import EngineFailed
from quire.ipc.journal import Journal, Record, Search
from quire.ipc.messages import PORT_SHIFT, Submit
from quire.request import Request
from tests.core.harness import limits
from tests.fake_executor import FakeExecutor
from tests.patience import WAIT_S


class Others:
    """A group that answers, or has lost a process: then the engine's own process would end in `check`."""

    def __init__(self, is_lost: bool = False) -> None:
        self.on_lost = self.on_fault = lambda reason: None
        self.is_lost = is_lost
        self.num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.is_lost:
            raise ProcessEnded


class ProcessEnded(BaseException):
    """Stands for the end of the process."""


def engine_of(group: Others, journal: Journal | None = None) -> Engine:
    chosen = limits()

    def fail(plan: object, prompts: object) -> None:
        raise RuntimeError("connection closed by peer")

    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, fail)
    engine = Engine(Scheduler(chosen, time.monotonic), executor)
    engine.group = group
    engine.judge(GroupFaults(group))
    if journal is not None:
        engine.take_over(journal)
    return engine


def test_a_failed_step_ends_the_engine_and_stays_in_the_journal():
    group, journal, abandoned = Others(), Journal(), queue.Queue()
    driver = Driver(engine_of(group, journal), abandon=lambda *why: abandoned.put(why))
    port = driver.open(lambda events: None)
    driver.start()
    request_id = port.number << PORT_SHIFT
    port.send(Submit(Request(request_id, (1, 2, 3), 4)))
    reason, no_request_at_fault = abandoned.get(timeout=WAIT_S)
    assert "the group cannot continue" in reason
    assert not no_request_at_fault
    assert group.num_checks >= 1
    assert journal.read().running == [request_id], "the next engine looks at it"
    driver.stop()


def test_a_lost_process_is_found_before_a_request_is_suspected():
    engine = engine_of(Others(is_lost=True))
    engine.add(Request(1, (1, 2, 3), 4))
    with pytest.raises(ProcessEnded):
        engine.step()
    assert engine.num_faults == 0


def test_a_failed_step_of_a_group_is_not_tried_again_in_the_same_processes():
    engine = engine_of(Others())
    engine.add(Request(1, (1, 2, 3), 4))
    with pytest.raises(EngineFailed, match="the group cannot continue"):
        engine.step()


def test_nothing_is_written_after_the_last_record():
    journal = Journal()
    journal.write(Record([1, 2], Search([[3]])))
    journal.write(Record(search=journal.read().search), is_last=True)
    journal.write(Record([4]))
    assert journal.read() == Record([], Search([[3]]))
