"""An engine with weights of eight bits gives the same tokens however its requests are scheduled."""

from dataclasses import replace
from typing import Any

import pytest

from quire.executor.executor import NOTHING_ASKED, JaxExecutor
from quire.executor.programs.ladder import StepShape
from quire.executor.shapes import Shapes
from quire.request import Request, SamplingParams
from tests.executor.rig import Rig, executor_of, quickly_compiled
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
    with quickly_compiled():
        return Rig(CASES["llama"], SHAPES, quantize="int8")


def test_answers_do_not_depend_on_scheduling(rig: Rig) -> None:
    requests = workload(rig, 16, longest=40)
    expected = rig.run(requests)
    assert not expected.failures
    assert expected.engine.scheduler.counters.cached_tokens > 0
    for settings in SCHEDULES:
        run = rig.run(requests, **settings)
        assert (run.engine.scheduler.counters.preemptions > 0) == ("num_pages" in settings)
        assert run.tokens() == expected.tokens(), settings


def test_answers_of_experts_do_not_depend_on_scheduling() -> None:
    """Whichever rows visit the same expert, and however many."""
    with quickly_compiled():
        rig = Rig({**CASES["qwen3_moe"], "num_hidden_layers": 1}, SHAPES, quantize="int8")
        requests = workload(rig, 12, longest=40)
        expected = rig.run(requests)
        assert not expected.failures
        for settings in SCHEDULES[:2]:
            assert rig.run(requests, **settings).tokens() == expected.tokens(), settings


def test_answers_do_not_depend_on_which_programs_are_ready(rig: Rig) -> None:
    """As while a server starts: a prompt runs in a large program until a smaller one is there."""
    drawn = SamplingParams(temperature=1.0)
    requests = [*workload(rig, 4, longest=40), *workload(rig, 4, longest=40, sampling=drawn)]
    requests = [replace(request, request_id=number) for number, request in enumerate(requests)]

    def tokens(executor: JaxExecutor, requests: list[Request]) -> dict[tuple[int, int], list[int]]:
        executor.reset()
        return rig.run(requests, engine=rig.engine(executor=executor)).tokens()

    found = []
    with quickly_compiled():
        catalog = rig.executor.programs.catalog
        for keys in (catalog.first, [*catalog.first, *catalog.early, StepShape(8), StepShape(16)]):
            executor = executor_of(rig.model, rig.weights, SHAPES)
            for key in keys:
                executor.programs.get(key)
            found.append([tokens(executor, [request]) for request in requests])
            table = executor.programs.table
            found.append(
                [table.forward(StepShape(10), 1).tokens, table.sample(1, NOTHING_ASKED)[1], table.start_size(2)]
            )
            executor.close()
    assert found[0] == found[2]
    assert found[1::2] == [[36, 4, 1], [16, 1, 8]]
