"""An engine ends, and another takes its place: the requests go on, and the one that ends engines is found."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.errors import QuireError, RequestFailed
from quire.ipc.journal import NUM_BYTES, Journal, Record, Search
from quire.ipc.messages import PORT_SHIFT, AllResumed, Submit
from quire.request import Request
from tests.core.harness import limits, request
from tests.fake_executor import POISON, FakeExecutor, expected_tokens
from tests.patience import WAIT_S

MAX_ENGINES = 60


class Death(BaseException):
    """Nothing survives it, as nothing survives a signal: not an Exception, so that no engine catches it."""


class Succession:
    """Engines one after the other, and a front end that brings each what the last one owes."""

    def __init__(self, dies: "Dies", lookahead: int = 1) -> None:
        self._dies = dies
        self._lookahead = lookahead
        self.journal = Journal()
        self.asked: dict[int, Request] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ended: set[tuple[int, int]] = set()
        self.errors: dict[int, QuireError] = {}
        self.num_engines = 0

    def run(self, asked: list[Request]) -> None:
        self.asked = {one.request_id: one for one in asked}
        self.tokens = {(one.request_id, sample): [] for one in asked for sample in range(one.samples)}
        while self._owed():
            self.num_engines += 1
            assert self.num_engines < MAX_ENGINES, "engines end for ever"
            try:
                self._run_one()
            except Death:
                continue

    def _owed(self) -> list[tuple[int, int]]:
        return [key for key in self.tokens if key not in self.ended and key[0] not in self.errors]

    def _run_one(self) -> None:
        chosen = limits(max_batch_size=16, max_step_tokens=64, num_pages=200)
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, self._dies)
        engine = Engine(Scheduler(chosen, lambda: 0.0), executor, self._lookahead)
        engine.take_over(self.journal)
        for request_id in sorted({request_id for request_id, _ in self._owed()}):
            one = self.asked[request_id]
            keys = [(request_id, sample) for sample in range(one.samples)]
            engine.add(one, [None if key in self.ended else self.tokens[key] for key in keys])
        self._note(engine.resume_search())
        while not engine.is_idle:
            outcome = engine.step()
            engine.scheduler.check()
            for update in outcome.updates:
                key = update.request_id, update.sample
                assert key not in self.ended
                self.tokens[key] += update.tokens
                if update.finish is not None:
                    self.ended.add(key)
            self._note(outcome.failures)

    def _note(self, failures) -> None:
        for failure in failures:
            assert failure.request_id not in self.errors
            self.errors[failure.request_id] = failure.error

    def check(self, *culprits: int) -> None:
        assert set(self.errors) == set(culprits)
        for (request_id, sample), tokens in self.tokens.items():
            if request_id not in culprits:
                assert tokens == expected_tokens(self.asked[request_id], sample)


class Dies:
    """At the steps of this number, counted over all engines; and when a poisoned request is beyond `after`."""

    def __init__(self, at: set[int] = frozenset(), after: int | None = None) -> None:
        self._at = at
        self._after = after
        self._num_steps = 0

    def __call__(self, plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        self._num_steps += 1
        if self._num_steps in self._at:
            raise Death
        for chunk, prompt in zip(plan.chunks, prompts, strict=True):
            if self._after is not None and POISON in prompt and chunk.start + chunk.length > self._after:
                raise Death


@given(at=st.sets(st.integers(1, 60), max_size=2), lookahead=st.integers(0, 2), samples=st.integers(1, 3))
@settings(max_examples=60)
def test_engines_that_end_at_any_step_lose_no_token(at, lookahead, samples):
    succession = Succession(Dies(at), lookahead)
    succession.run([request(n, prompt=(n, 1, 2), max_tokens=15, samples=samples, seed=n) for n in range(1, 13)])
    succession.check()


@pytest.mark.parametrize("culprit", [1, 8, 16])
@pytest.mark.parametrize("after", [0, 9])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_request_that_ends_engines_is_found_among_sixteen(culprit, after, lookahead):
    succession = Succession(Dies(after=after), lookahead)
    succession.run([request(n, prompt=(n, POISON if n == culprit else 2), max_tokens=20) for n in range(1, 17)])
    succession.check(culprit)
    assert isinstance(succession.errors[culprit], RequestFailed)
    assert "engine process ended" in succession.errors[culprit].message
    assert succession.num_engines <= 8, "more engines than halving sixteen takes"


@given(
    culprits=st.sets(st.integers(1, 12), max_size=3),
    at=st.sets(st.integers(1, 40), max_size=1),
    after=st.integers(0, 12),
)
@settings(max_examples=40)
def test_several_culprits_are_found_among_other_ends(culprits, at, after):
    succession = Succession(Dies(at, after))
    succession.run([request(n, prompt=(n, POISON if n in culprits else 2), max_tokens=12) for n in range(1, 13)])
    succession.check(*(culprits if after < 2 + 12 - 1 else ()))


def test_a_record_is_read_as_it_was_written():
    journal = Journal()
    assert journal.read() == Record()
    record = Record([1, 2**62], Search([[1], [2, 3]], 4, 5, 1, 2))
    journal.write(record)
    assert journal.read() == record


def test_a_record_too_large_to_keep_leaves_the_last_one():
    journal = Journal()
    journal.write(Record([1]))
    journal.write(Record(list(range(2**40, 2**40 + NUM_BYTES // 8))))
    assert journal.read() == Record([1])


@given(st.binary(max_size=200), st.integers(0, 100))
def test_a_write_that_was_cut_short_reads_as_nothing_or_as_what_was_written(garbage, at):
    journal, record = Journal(), Record([7, 8], Search([[7]]))
    journal.write(record)
    journal._memory[at : at + len(garbage)] = garbage
    assert journal.read() in (Record(), record)


def test_a_journal_outlives_the_process_that_wrote_it():
    code = (
        "import multiprocessing, os\n"
        "from quire.ipc.journal import Journal, Record\n"
        "def write(journal):\n"
        "    journal.write(Record([41, 42])); os.kill(os.getpid(), 9)\n"
        "if __name__ == '__main__':\n"
        "    journal = Journal()\n"
        "    process = multiprocessing.get_context('fork').Process(target=write, args=(journal,))\n"
        "    process.start(); process.join()\n"
        "    print(process.exitcode, journal.read().running)\n"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    assert told.split(maxsplit=1) == ["-9", "[41, 42]\n"]


def test_an_engine_waits_for_no_request_that_front_ends_do_not_bring_back():
    """One that has ended, or that another engine has. The clock stands still, so no time to wait passes."""
    ids = [number << PORT_SHIFT | 1 for number in (1, 2)]
    journal = Journal()
    journal.write(Record([*ids, ids[1] + 1]))
    chosen = limits(max_batch_size=16, max_step_tokens=64, num_pages=200)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
    engine = Engine(Scheduler(chosen, lambda: 0.0), executor, clock=lambda: 0.0)
    driver = Driver(engine, gather=engine.take_over(journal))
    driver.start(own_thread=False)
    one, other = (driver.open(lambda events: None, number) for number in (1, 2))
    other.send(Submit(request(ids[1], prompt=(1, 2)), so_far=[[]]))
    other.send(AllResumed())
    driver.turn()
    assert driver.is_gathering  # the first front end may bring its request
    assert not executor.plans
    one.send(AllResumed())
    driver.turn()
    assert not driver.is_gathering
    assert executor.plans
