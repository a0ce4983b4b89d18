"""Front ends that come, ask, change their minds, break and leave, in any order, while steps fail.

The driver's turns are taken one at a time on the test's own thread, so that every case can be repeated.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.port import Port
from quire.errors import EngineFailed
from quire.ipc.messages import Abort, Event, Failed, Queued, Started, Submit
from quire.request import Request
from tests.core.harness import limits, request
from tests.engine.test_engine import DeviceError, poisoned
from tests.engine.test_grammar_masks import expected
from tests.engine.toy_grammars import END, ToyGrammars, toy
from tests.fake_executor import NAN, POISON, FakeExecutor


class FrontEnd:
    def __init__(self, driver: Driver) -> None:
        self.port: Port = driver.open(self.take)
        self.broken = self.closed = False
        self.asked: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: Counter[int] = Counter()
        self.failed: dict[int, Failed] = {}
        self.started: set[int] = set()

    def take(self, events: list[Event]) -> None:
        if self.broken:
            raise OSError("the pipe is broken")
        for event in events:
            if isinstance(event, Failed):
                assert event.request_id in self.asked, "an event went to the wrong front end"
                assert event.request_id not in self.failed, "a request failed twice"
                self.failed[event.request_id] = event
                continue
            if isinstance(event, Queued):
                assert event.request_id in self.asked, "an event went to the wrong front end"
                continue
            if isinstance(event, Started):
                assert event.request_id in self.asked, "an event went to the wrong front end"
                assert event.request_id not in self.started, "a request started twice"
                self.started.add(event.request_id)
                continue
            for update in event.updates:
                assert update.request_id in self.asked, "an event went to the wrong front end"
                assert update.request_id not in self.failed, "a request went on after it had failed"
                self.tokens.setdefault((update.request_id, update.sample), []).extend(update.tokens)
                self.finished[update.request_id] += update.finish is not None

    def check_answers(self) -> None:
        for request_id, asked in self.asked.items():
            if request_id in self.aborted:
                continue
            failed = self.failed.get(request_id)
            if failed is None:
                assert self.finished[request_id] == asked.samples, "a request was not answered"
                for sample in range(asked.samples):
                    assert self.tokens[request_id, sample] == expected(asked, sample)
            elif failed.kind == "generation":
                assert POISON in asked.prompt or NAN in asked.prompt, "a request was blamed that did nothing"
            else:
                assert failed.kind in ("overloaded", "deadline_exceeded", "engine_stopped", EngineFailed.kind)


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.hiccups: int | None = None
        self.front_ends: list[FrontEnd] = []

    @initialize(
        lookahead=st.integers(0, 2),
        num_pages=st.sampled_from([16, 24, 60]),
        max_queued=st.sampled_from([None, 6]),
        poisoned_after=st.sampled_from([0, 5, 9]),
        at_submit=st.booleans(),
    )
    def start(self, lookahead, num_pages, max_queued, poisoned_after, at_submit):
        chosen = limits(num_pages=num_pages, max_queued=max_queued, max_sequence_tokens=40)
        poison = poisoned(poisoned_after)

        def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
            if self.hiccups:
                self.hiccups = 0
                raise DeviceError("a hiccup")
            poison(plan, prompts)

        faults = (fault, None) if at_submit else (None, fault)
        executor = FakeExecutor(num_pages, chosen.page_size, chosen.max_batch_size, *faults)
        scheduler = Scheduler(chosen, lambda: self.now)
        self.engine = Engine(scheduler, executor, lookahead, ToyGrammars(), clock=lambda: self.now)
        self.driver = Driver(self.engine)
        self.driver.start(own_thread=False)
        self.open()

    @rule()
    def open(self):
        self.front_ends.append(FrontEnd(self.driver))

    @rule(data=st.data(), count=st.integers(1, 4))
    def submit(self, data, count):
        for _ in range(count):
            front_end = data.draw(st.sampled_from(self.front_ends))
            prompt = data.draw(st.sampled_from([(1, 2, 3, 4, 5), (1, 2, 3), (1,), tuple(range(11))]))
            odd = data.draw(st.sampled_from([(), (), (), (), (POISON,), (NAN,)]))
            asked = request(
                front_end.port.request_id(len(front_end.asked) + 1),
                prompt=prompt + odd,
                max_tokens=data.draw(st.sampled_from([3, 1, 12, 20])),
                samples=data.draw(st.sampled_from([1, 1, 2])),
                seed=data.draw(st.integers(0, 1)),
                timeout_s=data.draw(st.sampled_from([None, None, 30.0])),
                end_ids=(END,),
                grammar=data.draw(st.sampled_from([None, None, None, toy(4)])),
            )
            front_end.asked[asked.request_id] = asked
            front_end.port.send(Submit(asked))

    @precondition(lambda self: any(one.asked for one in self.front_ends))
    @rule(data=st.data())
    def abort(self, data):
        front_end = data.draw(st.sampled_from([one for one in self.front_ends if one.asked]))
        request_id = data.draw(st.sampled_from(sorted(front_end.asked)))
        front_end.aborted.add(request_id)
        front_end.port.send(Abort(request_id))

    @rule(count=st.integers(1, 10))
    def turns(self, count):
        for _ in range(count):
            self._turn()

    @precondition(lambda self: self.hiccups is None)
    @rule()
    def hiccup(self):
        """One step fails for no reason, which must harm nobody whenever it happens. Twice in a row may."""
        self.hiccups = 1

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(data=st.data())
    def leave(self, data):
        front_end = data.draw(st.sampled_from(self.front_ends))
        front_end.closed = True
        front_end.port.close()

    @rule(data=st.data())
    def break_down(self, data):
        front_end = data.draw(st.sampled_from(self.front_ends))
        front_end.broken = True

    def _turn(self) -> None:
        if self.driver._inbox or not self.driver._is_idle():
            self.driver.turn()
            self.engine.scheduler.check()
            assert self.driver._failure is None

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        for _ in range(3000):
            self._turn()
        scheduler = self.engine.scheduler
        assert self.engine.is_idle, "the engine does not come to rest"
        assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1
        assert not any(self.driver._requests.values())
        for front_end in self.front_ends:
            if not (front_end.closed or front_end.broken):
                front_end.check_answers()


Interleavings.TestCase.settings = settings(settings.default, stateful_step_count=30)
TestInterleavings = Interleavings.TestCase
