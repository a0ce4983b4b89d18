"""An engine with weights of eight bits gives the same tokens however its requests are scheduled."""

from typing import Any

import pytest

from quire.executor.shapes import Shapes
from tests.executor.rig import Rig
from tests.executor.workload import workload
from tests.models.cases import CASES

SHAPES = Shapes(num_pages=64, page_size=4, num_slots=4, max_prefill_tokens=32, max_sequence_tokens=72)
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_batch_size": 1, "prefix_caching": False},
    {"max_batch_prefill_tokens": 7, "lookahead": 2},
    {"num_pages": 24},
)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(CASES["llama"], SHAPES, first_programs_only=True, quantize="int8")


def test_answers_do_not_depend_on_scheduling(rig: Rig) -> None:
    requests = workload(rig, 16, longest=40)
    expected = rig.run(requests)
    assert not expected.failures
    assert expected.engine.scheduler.counters.cached_tokens > 0
    for settings in SCHEDULES:
        run = rig.run(requests, **settings)
        assert (run.engine.scheduler.counters.preemptions > 0) == ("num_pages" in settings)
        assert run.tokens() == expected.tokens(), settings
