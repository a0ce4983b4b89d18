"""Pages that go astray are found while the engine is idle, told of, and mended."""

import logging
import time

import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from tests.core.harness import limits, request
from tests.engine.test_engine import Rig
from tests.fake_executor import FakeExecutor
from tests.patience import WAIT_S


def lose_a_page(scheduler: Scheduler) -> None:
    scheduler._running.pool.take(1)


def free_a_page_twice(scheduler: Scheduler) -> None:
    scheduler._running.pool._free.append(scheduler._running.pool._free[0])


def free_a_cached_page(scheduler: Scheduler) -> None:
    scheduler._running.pool.release([next(iter(scheduler._running.cache.pages()))])


def miscount_cached_pages(scheduler: Scheduler) -> None:
    scheduler._running.cache.num_evictable += 1


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler._running._free_slots.pop()


def swap_pages(scheduler: Scheduler) -> None:
    """What counts alone do not show: one page is lost while another is free twice."""
    scheduler._running.pool._free[0] = scheduler._running.pool._free[1]


HARMS = [lose_a_page, free_a_page_twice, free_a_cached_page, miscount_cached_pages, lose_a_slot, swap_pages]


def used_rig() -> Rig:
    rig = Rig()
    for index in range(6):
        rig.add(request(index, prompt=(index, 1, 2, 3, 4, 5), max_tokens=10))
    rig.run()
    return rig


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_wrong_is_told_and_mended(harm, caplog):
    rig = used_rig()
    scheduler = rig.engine.scheduler
    harm(scheduler)
    rig.engine.audit(thorough=True)
    assert rig.engine.num_repairs == 1
    (line,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "page" in line
    scheduler.check()
    assert scheduler.stats().free_pages == scheduler.limits.num_pages - 1
    for index in range(6, 12):
        rig.add(request(index, prompt=(index, 1, 2, 3, 4, 5), max_tokens=10))
    rig.run()
    rig.check_survivors()


def test_where_all_is_well_nothing_happens_and_the_cache_stays():
    rig = used_rig()
    cached = rig.engine.scheduler.stats().cached_pages
    rig.engine.audit(thorough=True)
    assert rig.engine.num_repairs == 0
    assert rig.engine.scheduler.stats().cached_pages == cached > 0


def test_while_something_runs_nothing_is_looked_at():
    rig = Rig()
    rig.add(request(1, max_tokens=30))
    rig.engine.step()
    lose_a_page(rig.engine.scheduler)
    rig.engine.audit(thorough=True)
    assert rig.engine.num_repairs == 0


@pytest.mark.parametrize("harm", [lose_a_page, swap_pages])
def test_an_idle_driver_looks_by_itself(harm):
    chosen = limits(num_pages=50)
    engine = Engine(Scheduler(chosen, time.monotonic), FakeExecutor(chosen.num_pages, chosen.page_size, 4))
    harm(engine.scheduler)
    driver = Driver(engine, audit_after_s=0.05)
    driver.start()
    until_s = time.monotonic() + WAIT_S
    while not engine.num_repairs and time.monotonic() < until_s:
        time.sleep(0.01)
    assert driver.stop(join_s=WAIT_S)
    assert engine.num_repairs == 1
