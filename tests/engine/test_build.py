"""Engines whose programs begin before their weights are loaded, as on a GPU."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.building.build import Built, build_engine
from quire.engine.building.compiling import program_store
from quire.engine.building.deployment import Deployment
from quire.engine.building.page_count import SMALL_STEP, estimated_step_bytes, measures_step
from quire.engine.building.plan import plan_deployment
from quire.executor.programs.catalog import Catalog
from quire.files.cache_folder import cache_folder
from quire.files.progress import Progress, Report
from quire.request import Request, SamplingParams
from quire.settings.config import Config
from tests.models.cases import CASES
from tests.patience import WAIT_S

# On a CPU weights of this type are not packed, so that their structure is known before, as on other devices.
DTYPE = "bfloat16"


def planned(folder: Path, platform: str, is_served: bool = True, case: str = "llama", **settings: Any) -> Deployment:
    model = folder / "config.json"
    model.write_text(json.dumps(CASES[case]))
    cache = folder / platform
    if not cache.exists():
        cache.mkdir()
        (cache / "native").symlink_to(cache_folder() / "native")
    sizes: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_batch_size": 2, "max_batch_prefill_tokens": 8}
    config = Config(f"random:{model}", cache_dir=cache, dtype=DTYPE, max_total_tokens=64, **sizes, **settings)
    deployment = plan_deployment(config, is_served=is_served)
    return replace(deployment, facts=replace(deployment.facts, platform=platform))


def when(is_so: Callable[[], bool], then: Callable[[], None] = lambda: None) -> Progress:
    """Keeps weights from being loaded until something is so."""

    @contextmanager
    def progress(label: str) -> Iterator[Report]:
        until_s = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        then()
        yield lambda done, total: None

    return progress


def num_programs(deployment: Deployment) -> int:
    """Programs that are made and kept."""
    assert deployment.config.cache_dir is not None
    return len(list(deployment.config.cache_dir.glob("programs/*/*.program")))


def tokens_of(built: Built) -> list[int]:
    for _ in built.warm_up():
        pass
    built.engine.add(Request(1, (3, 5, 7, 11, 13), 8, SamplingParams(temperature=0.0), seed=1, ignore_end=True))
    tokens: list[int] = []
    while not built.engine.is_idle:
        for update in built.engine.step().updates:
            tokens += update.tokens
    return tokens


def test_an_answer_that_grows_beyond_a_longrope_is_computed_as_a_prompt_of_its_length(tmp_path: Path) -> None:
    built = build_engine(planned(tmp_path, "cpu", case="phi3-long", is_served=False))
    for _ in built.warm_up():
        pass
    requests = [Request(1, tuple(range(3, 17)), 20, SamplingParams(temperature=0.0), seed=1, ignore_end=True)]
    answers: dict[int, list[int]] = {1: [], 2: []}
    for number in (1, 2):
        built.engine.add(requests[-1])
        while not built.engine.is_idle:
            for update in built.engine.step().updates:
                answers[number] += update.tokens
        prompt = (*requests[0].prompt, *answers[1][:3])  # its last token is the first beyond the length of 16
        requests.append(replace(requests[0], request_id=2, prompt=prompt, max_tokens=17))
    built.executor.close()
    assert answers[1][3:] == answers[2]
    assert len(set(answers[2])) > 4


@pytest.mark.parametrize("num_processes", [0, 1])
def test_programs_that_begin_before_the_weights_are_loaded_compute_with_them(
    tmp_path: Path, num_processes: int
) -> None:
    ahead, usual = planned(tmp_path, "tpu"), planned(tmp_path, "cpu")
    ahead = replace(ahead, resolved=replace(ahead.resolved, compile_processes=num_processes))
    ahead = replace(ahead, config=replace(ahead.config, compile_processes=num_processes))
    found = []
    for deployment, progress in ((ahead, when(lambda: num_programs(ahead) > 0)), (usual, when(lambda: True))):
        built = build_engine(deployment, progress)
        found.append(tokens_of(built))
        assert built.executor.num_late == 0
        built.executor.close()
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_no_program_is_made_any_more_when_loading_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no such file")

    deployment = planned(tmp_path, "tpu")
    with pytest.raises(OSError, match="no such file"):
        build_engine(deployment, when(lambda: num_programs(deployment) > 0, fail))
    until_s = time.monotonic() + WAIT_S
    while any(thread.name.startswith("quire-compile") for thread in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert num_programs(deployment) < len(Catalog(deployment.shapes).keys)


@pytest.mark.parametrize(("share", "is_measured"), [(0.9, False), (1.1, True)])
def test_a_step_is_measured_where_its_estimate_takes_much_of_the_pages_memory(
    tmp_path: Path, share: float, is_measured: bool
) -> None:
    deployment = planned(tmp_path, "gpu")
    deployment = replace(deployment, config=replace(deployment.config, num_pages=None))
    num_pages = round(estimated_step_bytes(deployment) / (share * SMALL_STEP * deployment.page_bytes))
    deployment = replace(deployment, limits=replace(deployment.limits, num_pages=num_pages))
    assert measures_step(deployment) == is_measured
    assert measures_step(replace(deployment, resolved=replace(deployment.resolved, quantize="fp8")))
    given = replace(deployment, config=replace(deployment.config, num_pages=num_pages))
    assert not measures_step(given)


def test_bursts_may_take_longer_where_no_client_waits(tmp_path: Path) -> None:
    bursts = [planned(tmp_path, "cpu", is_served).resolved.max_burst_ms for is_served in (True, False)]
    assert bursts == [10.0, 50.0]
    given = [planned(tmp_path, "cpu", is_served, max_burst_ms=0.0).resolved.max_burst_ms for is_served in (True, False)]
    assert given == [0, 0]


def test_the_longest_burst_is_among_the_choices_of_a_server_that_has_bursts(tmp_path: Path) -> None:
    without, with_bursts = (planned(tmp_path, "cpu", max_burst=most) for most in (1, 4))
    assert "max_burst_ms" not in {choice.name for choice in without.choices}
    assert {choice.name: choice.value for choice in with_bursts.choices}["max_burst_ms"] == 10.0


def test_programs_are_found_again_by_an_engine_with_another_burst(tmp_path: Path) -> None:
    digests = {program_store(planned(tmp_path, "cpu", max_burst=most)).digest for most in (1, 2, 4)}
    assert len(digests) == 1
    assert program_store(planned(tmp_path, "cpu", max_burst=1, speculate=1)).digest not in digests
