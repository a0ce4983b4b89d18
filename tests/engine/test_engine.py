"""Steps that fail: only the request at fault hears of it."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.plan import Kind, StepPlan, StepResult, Update
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import EngineFailed, InvalidRequest, InvalidSetting, PromptTooLong, QuireError, RequestFailed
from quire.request import Request
from tests.core.harness import limits, request
from tests.engine.toy_grammars import END, FORCING, ToyGrammars, guide, toy
from tests.fake_executor import POISON, FakeExecutor, Fault, expected_tokens


class DeviceError(RuntimeError):
    """What a device throws."""


class Rig:
    """An engine on the fake device, and what its requests were told."""

    def __init__(self, at_submit: Fault | None = None, at_result: Fault | None = None, lookahead: int = 1, **changes):
        chosen = limits(**({"max_batch_size": 16, "max_step_tokens": 64, "num_pages": 200} | changes))
        self.executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, at_submit, at_result)
        self.engine = Engine(Scheduler(chosen, lambda: 0.0), self.executor, lookahead)
        self.asked: dict[int, Request] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.errors: dict[int, QuireError] = {}

    def add(self, asked: Request) -> None:
        self.engine.add(asked)
        self.asked[asked.request_id] = asked

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if self.engine.is_idle:
                return
            outcome = self.engine.step()
            self.engine.scheduler.check()
            self._take(outcome.updates)
            for failure in outcome.failures:
                assert failure.request_id not in self.errors
                self.errors[failure.request_id] = failure.error
        raise AssertionError("the engine does not come to rest")

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            self.tokens.setdefault((update.request_id, update.sample), []).extend(update.tokens)

    def check_survivors(self, *culprits: int) -> None:
        assert set(self.errors) == set(culprits)
        for request_id, asked in self.asked.items():
            for sample in range(asked.samples) if request_id not in culprits else ():
                assert self.tokens[request_id, sample] == expected_tokens(asked, sample)


def poisoned(after: int = 0) -> Fault:
    """Fails every step in which a poisoned request computes position `after` or a later one."""

    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        for chunk, prompt in zip(plan.chunks, prompts, strict=True):
            if POISON in prompt and chunk.start + chunk.length > after:
                raise DeviceError("poisoned")

    return fault


@pytest.mark.parametrize("where", ["at_submit", "at_result"])
@pytest.mark.parametrize("culprit", [0, 7, 15])
@pytest.mark.parametrize("after", [0, 3, 9])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_one_of_sixteen_fails_alone(where, culprit, after, lookahead, caplog):
    rig = Rig(**{where: poisoned(after)}, lookahead=lookahead)
    for index in range(16):
        rig.add(request(index, prompt=(index, 1, POISON if index == culprit else 2), max_tokens=20))
    rig.run()
    rig.check_survivors(culprit)
    assert isinstance(rig.errors[culprit], RequestFailed)
    assert rig.errors[culprit].message == "the steps of this request fail: an internal error; see the log"
    assert "poisoned" in caplog.text
    assert rig.engine.num_requests_blamed == 1
    assert rig.executor.num_resets <= 7, "the search takes more tries than halving does"


@given(
    culprits=st.sets(st.integers(0, 11), max_size=4),
    after=st.integers(0, 20),
    lookahead=st.integers(0, 2),
    changes=st.fixed_dictionaries(
        {"num_pages": st.sampled_from([16, 24, 60]), "max_batch_prefill_tokens": st.integers(2, 16)}
    ),
    samples=st.integers(1, 2),
)
def test_any_number_of_culprits_is_found_whatever_the_schedule(culprits, after, lookahead, changes, samples):
    rig = Rig(at_result=poisoned(after), lookahead=lookahead, max_batch_size=6, **changes)
    for index in range(12):
        prompt = (1, 2, 3, 4, index, POISON if index in culprits else 2)
        rig.add(request(index, prompt=prompt, max_tokens=12, samples=samples, seed=index % 3))
    rig.run()
    reached = after < 6 + 12 - 1  # the position of the last token that is fed back
    assert set(rig.errors) == (culprits if reached else set())
    rig.check_survivors(*rig.errors)


@pytest.mark.parametrize("hiccup_at", range(1, 25))
def test_a_passing_fault_in_the_middle_of_a_search_ends_no_other_request(hiccup_at):
    poison, steps = poisoned(), []

    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        steps.append(plan.step)
        if len(steps) == hiccup_at:
            raise DeviceError("a hiccup")
        poison(plan, prompts)

    rig = Rig(at_result=fault)
    for index in range(4):
        rig.add(request(index, prompt=(index, POISON if index == 2 else 1), max_tokens=6))
    rig.run()
    rig.check_survivors(2)


def test_a_request_that_was_cleared_is_not_in_doubt_later():
    """Faults that pass by themselves: a request fails, fails alone, and gets past it; twice."""
    failed = []

    def passing(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        is_probe = prompts == [(0,)]
        wanted = len(failed) < 2 or (len(failed) < 4 and plan.chunks[0].start + plan.chunks[0].length > 9)
        if wanted and not is_probe:
            failed.append(plan.step)
            raise DeviceError("a hiccup")

    rig = Rig(at_result=passing)
    rig.add(request(0, prompt=(5, 1, 2), max_tokens=12))
    rig.run()
    assert len(failed) == 4
    rig.check_survivors()


def test_a_fault_that_does_not_return_ends_no_request():
    failed = []

    def once(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if plan.step >= 5 and not failed:
            failed.append(plan.step)
            raise DeviceError("a hiccup")

    rig = Rig(at_result=once)
    for index in range(8):
        rig.add(request(index, prompt=(index, 1, 2), max_tokens=12))
    rig.run()
    rig.check_survivors()
    assert rig.executor.num_resets == 1


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_fault_that_follows_no_request_ends_in_an_engine_error(count, caplog):
    def always(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        raise DeviceError("the device is on fire")

    rig = Rig(at_submit=always)
    for index in range(count):
        rig.add(request(index, prompt=(index, 1, 2), max_tokens=12))
    rig.run()
    assert [type(rig.errors[index]) for index in range(count)] == [EngineFailed] * count
    assert rig.errors[0].message == "steps fail with any request: an internal error; see the log"
    assert "the engine gives up: steps fail with any request: DeviceError('the device is on fire')" in caplog.text
    with pytest.raises(EngineFailed):
        rig.add(request(99))
    assert rig.executor.num_resets < 10


def test_when_only_decodes_fail_every_request_ends_within_bounds():
    def decodes(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if any(chunk.kind is Kind.DECODE for chunk in plan.chunks):
            raise DeviceError("no decode works")

    rig = Rig(at_submit=decodes)
    for index in range(8):
        rig.add(request(index, prompt=(index, 1, 2), max_tokens=50))
    rig.run()
    assert len(rig.errors) == 8
    assert rig.executor.num_resets < 100


def test_a_fault_of_a_combination_ends_in_an_engine_error_after_a_bounded_number_of_tries():
    def together(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if len(plan.chunks) > 1:
            raise DeviceError("two are too many")

    rig = Rig(at_submit=together)
    for index in range(4):
        rig.add(request(index, prompt=(index, 1, 2), max_tokens=50))
    rig.run()
    assert rig.executor.num_resets < 200


def test_a_probe_whose_row_has_no_result_counts_as_a_fault_of_the_engine():
    """Every row comes back without numbers, and one request fails its steps besides."""

    class NoNumbers(FakeExecutor):
        def _run(self, plan: StepPlan) -> StepResult:
            result = super()._run(plan)
            sick = {index: "not numbers" for index, chunk in enumerate(plan.chunks) if chunk.length == 1}
            return result._replace(tokens=[[] for _ in result.tokens], failed=sick)

    rig = Rig(at_submit=poisoned())
    chosen = rig.engine.scheduler.limits
    executor = NoNumbers(chosen.num_pages, chosen.page_size, chosen.max_batch_size, poisoned())
    rig.engine = Engine(Scheduler(chosen, lambda: 0.0), executor)
    rig.add(request(1, prompt=(POISON, 1)))
    rig.run()
    assert isinstance(rig.errors[1], EngineFailed)
    assert set(rig.errors) == {1}


def test_ids_below_zero_are_the_engine_s_own():
    rig = Rig()
    with pytest.raises(InvalidRequest, match="request_id is -1; it must be at least 0"):
        rig.add(request(-1))


def test_an_engine_too_small_to_be_probed_is_refused():
    with pytest.raises(PromptTooLong, match="the limit is 1"):
        Rig(max_sequence_tokens=1)


def test_a_device_that_cannot_be_rebuilt_is_an_engine_error(caplog):
    rig = Rig(at_submit=poisoned())

    def refuse() -> None:
        raise DeviceError("no memory")

    rig.executor.reset = refuse  # type: ignore[method-assign]
    rig.add(request(1, prompt=(POISON,)))
    rig.run()
    assert isinstance(rig.errors[1], EngineFailed)
    assert rig.errors[1].message == "the device state could not be rebuilt: an internal error; see the log"
    assert "DeviceError('no memory')" in caplog.text


def test_the_search_goes_on_when_its_suspects_leave():
    rig = Rig(at_result=poisoned())
    for index in range(4):
        rig.add(request(index, prompt=(index, POISON if index == 0 else 2), max_tokens=6))
    rig.engine.launch()
    rig.engine.collect()
    for index in (0, 1):
        rig.engine.abort(index)
        del rig.asked[index]
    rig.run()
    rig.check_survivors()


def test_a_step_is_launched_before_the_last_one_is_collected():
    rig = Rig(lookahead=1)
    rig.add(request(1, max_tokens=8))
    assert rig.engine.launch()
    assert rig.engine.launch()
    assert not rig.engine.launch()
    assert rig.engine.num_in_flight == 2
    rig.run()
    rig.check_survivors()


def short_of_memory(num_tokens: int) -> Fault:
    """Fails every step with more tokens than this."""

    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if plan.num_tokens > num_tokens:
            raise DeviceError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    return fault


@pytest.mark.parametrize("where", ["at_submit", "at_result"])
@pytest.mark.parametrize("room", [1, 3, 7, 20])
def test_steps_shrink_when_memory_is_short_and_no_request_is_blamed(where, room):
    rig = Rig(**{where: short_of_memory(room)})
    for index in range(12):
        rig.add(request(index, prompt=tuple(range(index + 1, index + 20)), max_tokens=12, samples=1 + index % 2))
    rig.run()
    rig.check_survivors()
    assert rig.engine.num_requests_blamed == 0
    assert rig.engine.num_shrinks >= 1


def test_a_lone_row_of_several_tokens_is_not_as_small_as_can_be():
    """Its request, here with tokens that its grammar forces, gets one token to a step before it is blamed."""
    rig = Rig(at_result=short_of_memory(1))
    chosen = rig.engine.scheduler.limits
    rig.engine = Engine(Scheduler(chosen, lambda: 0.0), rig.executor, 1, ToyGrammars())
    asked = request(1, prompt=(3,), max_tokens=20, grammar=toy(FORCING), end_ids=(END,))
    rig.add(asked)
    rig.run()
    assert not rig.errors
    assert rig.tokens[1, 0] == expected_tokens(asked, guide=partial(guide, asked.grammar))
    kinds = [chunk.kind for plan in rig.executor.plans for chunk in plan.chunks]
    assert kinds.count(Kind.FORCED) == 2  # the one that failed, and the one behind it
    assert rig.engine.num_requests_blamed == 0


def test_steps_grow_again_after_a_while():
    shortage = short_of_memory(10)
    rig = Rig(at_result=lambda plan, prompts: shortage(plan, prompts) if plan.step < 50 else None)
    for index in range(200):
        rig.add(request(index, prompt=(index % 40, 1, 2, 3, 4), max_tokens=40))
    rig.run()
    rig.check_survivors()
    assert rig.engine.num_shrinks >= 1
    assert rig.engine.scheduler.budget.is_whole


def test_a_lone_step_that_runs_out_of_memory_again_and_again_costs_its_request():
    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if any(POISON in prompt for prompt in prompts):
            raise DeviceError("RESOURCE_EXHAUSTED: Out of memory")

    rig = Rig(at_result=fault)
    for index in range(6):
        rig.add(request(index, prompt=(index, POISON if index == 3 else 2), max_tokens=8))
    rig.run()
    rig.check_survivors(3)


@pytest.mark.parametrize("where", ["at_submit", "at_result"])
def test_a_setting_that_no_request_can_run_with_ends_the_engine_at_once(where):
    def refuse(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        raise InvalidSetting("reproducible: rows have other bits")

    rig = Rig(**{where: refuse})
    for index in range(4):
        rig.add(request(index, prompt=(5,)))
    rig.run()
    assert {error.message for error in rig.errors.values()} == {
        "the engine cannot run as it is set: reproducible: rows have other bits"
    }
    assert set(rig.errors) == set(range(4))
    assert rig.engine.num_faults == 1
    with pytest.raises(EngineFailed, match="rows have other bits"):
        rig.add(request(5, prompt=(5,)))
