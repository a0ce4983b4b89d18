"""Sequences with different adapters in one batch: each has the tokens that it has alone, those of merged weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.engine import Engine
from quire.models.adapters import AdapterSizes
from quire.request import Request, SamplingParams
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import FEW_SHAPES, Rig, Run, config_of, quickly_compiled
from tests.models.adapter_files import Merged, write_adapter
from tests.models.tiny import NamedTensors

GREEDY = SamplingParams(temperature=0)
CONFIG = config_of("llama")
NAMES = ("a", "b", "c")
SHAPES = replace(FEW_SHAPES, guesses=4, step_guesses=16, adapters=AdapterSizes(slots=2, rank=4))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with quickly_compiled():
        made = Rig(CONFIG, SHAPES)
    yield made
    made.executor.close()


@pytest.fixture(scope="module")
def folders(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of ranks 2, 3 and 4. The last one changes two projections alone."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, rig.model, seed=rank, rank=rank, only="v_proj" if name == "c" else "")
        for rank, name in enumerate(NAMES, start=2)
    }


def engine(rig: Rig, folders: dict[str, Path], **settings: object) -> Engine:
    made = rig.engine(**settings)  # type: ignore[arg-type]
    for name, folder in folders.items():
        made.adapters.load(name, str(folder))
    return made


def crowd(count: int = 12, **fields: object) -> list[Request]:
    """All begin with the same page, with and without adapters."""
    names = [None, *NAMES]
    head = tuple(range(20, 29))
    return [
        Request(number, (*head, number, 40), 14, GREEDY, adapter=names[number % 4], **fields)  # type: ignore[arg-type]
        for number in range(count)
    ]


def alone(rig: Rig, folders: dict[str, Path], request: Request) -> list[int]:
    return rig.run([request], engine=engine(rig, folders, prefix_caching=False)).tokens()[request.request_id, 0]


def test_a_mixed_batch_gives_each_the_tokens_that_it_has_alone(rig: Rig, folders: dict[str, Path]) -> None:
    """Three adapters, two slots, four rows, in any order, guesses included."""
    requests = crowd()
    run = rig.run(requests, engine=engine(rig, folders))
    assert not run.failures
    assert run.engine.num_faults == 0
    assert run.engine.scheduler.counters.guesses > 0
    for request in requests:
        assert run.tokens()[request.request_id, 0] == alone(rig, folders, request), request.adapter
    assert len({tuple(tokens) for tokens in run.tokens().values()}) > 4, "the adapters change nothing"


def test_log_probabilities_are_the_same_bit_by_bit(rig: Rig, folders: dict[str, Path]) -> None:
    requests = [replace(one, sampling=SamplingParams(temperature=0, logprobs=2)) for one in crowd(8)]
    run = rig.run(requests, engine=engine(rig, folders))
    for request in requests:
        lone = rig.run([request], engine=engine(rig, folders, prefix_caching=False))
        assert run.answers[request.request_id, 0].logprobs == lone.answers[request.request_id, 0].logprobs


@pytest.mark.parametrize(("name", "scale"), [("a", 4 / 2), ("b", 4 / 3), ("c", 4 / 4)])
def test_tokens_are_those_of_merged_weights(rig: Rig, folders: dict[str, Path], name: str, scale: float) -> None:
    merged = Merged(NamedTensors(rig.model), rig.model, folders[name], scale)
    with quickly_compiled():
        other = Rig(CONFIG, FEW_SHAPES, checkpoint=merged)
    requests = [one for one in crowd() if one.adapter == name]
    run = rig.run(requests, engine=engine(rig, folders))
    for request in requests:
        other.near_ties(request, run.tokens()[request.request_id, 0])
    other.executor.close()


def test_nothing_is_compiled_by_loading_and_swapping(rig: Rig, folders: dict[str, Path]) -> None:
    made = engine(rig, folders)
    table = rig.executor.programs.table

    def between(engine: Engine, steps: int) -> None:
        if steps == 5:  # under way
            engine.adapters.load("a", str(folders["b"]))

    rig.run(crowd(), engine=made, between=between)
    assert rig.executor.programs.table is table, "a program was wanted that is in no table"
    assert rig.executor.num_late == 0


def test_those_that_run_keep_an_adapter_that_is_replaced(rig: Rig, folders: dict[str, Path]) -> None:
    requests = [replace(one, adapter="a") for one in crowd(4)]

    def between(engine: Engine, steps: int) -> None:
        if steps == 3:
            engine.adapters.load("a", str(folders["b"]))
            engine.add(replace(requests[0], request_id=77))
        if steps == 5:
            engine.adapters.unload("a")

    rig.executor.adapters.clear()
    run = rig.run(requests, engine=engine(rig, folders), between=between)
    assert len(rig.executor.adapters) == 2, "arrays of an adapter that none can use are kept"
    assert run.engine.num_faults == 0
    for request in requests:
        assert run.tokens()[request.request_id, 0] == alone(rig, folders, request)
    assert run.tokens()[77, 0] == alone(rig, folders, replace(requests[0], adapter="b"))


def test_adapters_are_back_after_the_device_was_lost(rig: Rig, folders: dict[str, Path]) -> None:
    requests = crowd(6)
    executor = FaultyExecutor(rig.executor, lambda plan: plan.step == 6)
    run = rig.run(requests, engine=engine(rig, folders, executor=executor))
    assert executor.num_resets == 1
    assert not run.failures
    for request in requests:
        assert run.tokens()[request.request_id, 0] == alone(rig, folders, request)


def int8_run(folders: dict[str, Path], requests: list[Request]) -> tuple[Run, list[Run]]:
    shapes = replace(FEW_SHAPES, adapters=AdapterSizes(2, 4, "bfloat16"))
    with quickly_compiled():
        rig = Rig(CONFIG, shapes, quantize="int8")
    run = rig.run(requests, engine=engine(rig, folders))
    lone = [rig.run([one], engine=engine(rig, folders, prefix_caching=False)) for one in requests]
    rig.executor.close()
    return run, lone


def test_quantised_weights_take_adapters_row_by_row(folders: dict[str, Path]) -> None:
    requests = crowd(8)
    run, lone = int8_run(folders, requests)
    for request, one in zip(requests, lone, strict=True):
        key = request.request_id, 0
        assert run.tokens()[key] == one.tokens()[key]
