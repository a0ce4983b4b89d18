"""One set of capabilities, crossed: a crowd of requests through an engine and its driver, to their end."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from quire.engine.driver import Driver, Phase
from quire.engine.engine import Engine
from quire.engine.preparations import GATHER_S
from quire.ipc.journal import Journal
from quire.ipc.messages import Abort, AllResumed, LoadAdapter, Submit, SyncAdapters, UnloadAdapter
from quire.request import Request
from tests.crossings.bench import Bench, Faults
from tests.crossings.capability import Capability, EngineSetting, Incident, Layout, RequestField
from tests.crossings.engine_setup import LAST_MOMENT, EngineSetup
from tests.crossings.front_end import Answer, FrontEnd, Told
from tests.crossings.refusals import are_exclusive
from tests.crossings.request_draft import RequestDraft, plain_draft
from tests.patience import WAIT_S

MAX_TURNS = 4000
MAX_FAULTS = 2  # by chance: more could fail one request by itself so often that it is blamed
TURN_S = 0.0002


class LogAboveInfo(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (f" ({record.exc_info[1]!r})" if record.exc_info else ""))


class Crossing:
    """The driver's turns are taken here, one at a time, and its clock is `now`, so that every case can be repeated.

    `seed` decides all that is left to chance.
    """

    def __init__(self, bench: Bench, capabilities: list[Capability], seed: int, num_requests: int = 12) -> None:
        self.capabilities = capabilities
        self.chance = Random(f"crossing {seed}")
        self.now = 100.0
        self.faults = Faults(before_result=[self._take_time])
        self.is_draining = False
        self.unloaded: set[str] = set()
        self.happened: Counter[str] = Counter()
        self._bench = bench
        self._seed = seed
        self._journal = Journal()
        self._actions: dict[int, list[Callable[[], None]]] = {}  # by turn
        self._num_faults = self._num_commands = 0
        self.setup = EngineSetup(self.chance)
        for one in capabilities:
            if isinstance(one, (Layout, EngineSetting)):
                self.setup.chance = self._chance_of(one)
                if isinstance(one, Layout):
                    self.setup.layout = one.name
                one.switch_on(self.setup)
        self.drafts = [self._draft(number) for number in range(num_requests)]
        for one in capabilities:
            if isinstance(one, Incident):
                self.chance = self._chance_of(one)
                one.switch_on(self)
        self.chance = Random(f"turns {seed}")
        self.front_ends = [FrontEnd(number) for number in (1, 2)]

    def _chance_of(self, capability: Capability) -> Random:
        """Of its own, so that what it draws does not depend on the others."""
        return Random(f"{self._seed} {capability.name}")

    def _draft(self, number: int) -> RequestDraft:
        """The first request has as many of the fields as go together, the others have some."""
        chance = Random(f"{self._seed} request {number}")
        draft = plain_draft(chance, self.setup, number)
        fields = [one for one in self.capabilities if isinstance(one, RequestField)]
        chance.shuffle(fields)
        chosen: list[RequestField] = []
        for one in fields:
            if (number == 0 or chance.random() < 0.5) and not any(are_exclusive(one, other) for other in chosen):
                chosen.append(one)
                one.switch_on(draft)
        return draft

    # What incidents do

    def at_some_turn(self, action: Callable[[], None], first: int = 1) -> None:
        self._at(self.chance.randrange(first, LAST_MOMENT), action)

    def _at(self, turn: int, action: Callable[[], None]) -> None:
        self._actions.setdefault(turn, []).append(action)

    def may_fail_by_chance(self) -> bool:
        self._num_faults += 1
        return self._num_faults <= MAX_FAULTS

    def mark_one_prompt(self, token: int) -> None:
        draft = self.chance.choice(self.drafts)
        draft.prompt = (*draft.prompt[:-1], token)

    def abort_one(self) -> None:
        live = [(one, told) for one in self.front_ends for told in one.told.values() if not told.has_ended]
        if live:
            front_end, told = self.chance.choice(live)
            self._end_unheard(told)
            front_end.port.send(Abort(told.request.request_id))

    def front_end_leaves(self) -> None:
        self._leave(self.front_ends[0])
        self.front_ends[0].has_left = True
        self.front_ends[0].port.close()

    def front_end_breaks(self) -> None:
        self._leave(self.front_ends[0])
        self.front_ends[0].is_broken = True

    def _leave(self, front_end: FrontEnd) -> None:
        for told in front_end.told.values():
            if not told.has_ended:
                self._end_unheard(told)

    def _end_unheard(self, told: Told) -> None:
        told.is_aborted = True
        self.happened["aborted"] += 1

    def drain(self, drain_s: float) -> None:
        self.is_draining = True
        self.driver.stop(drain_s)

    def pause(self) -> None:
        """Nothing happens for a while. An idle engine looks after itself then."""
        self.now += 40.0
        if not self.driver._inbox and self.driver._is_idle() and not self.is_draining:
            self.driver._idle_upkeep.begin()
            self.now += 40.0
            self.driver._idle_upkeep.run()

    def replace_adapter(self) -> None:
        self._command(LoadAdapter(self._next_command(), self.setup.adapters[0], self._bench.replacement))

    def unload_adapter(self) -> None:
        name = self.setup.adapters[-1]
        self.unloaded.add(name)
        self._command(UnloadAdapter(self._next_command(), name))

    def _next_command(self) -> int:
        self._num_commands += 1
        return self._num_commands

    def _command(self, command: LoadAdapter | UnloadAdapter) -> None:
        if not self.is_draining:
            self.front_ends[1].port.send(command)

    def engine_ends(self) -> None:
        """As by a signal. Another takes its place, and front ends bring it what is owed."""
        if self.is_draining or not self.may_fail_by_chance():
            return
        self.happened["engine ended"] += 1
        self._begin_engine()
        for front_end in self.front_ends:
            if not front_end.is_there:
                continue
            front_end.port = self.driver.open(front_end.take, front_end.number)
            if front_end.adapters.version:
                front_end.port.send(SyncAdapters(front_end.adapters.version, front_end.adapters.folders))
            for told in front_end.told.values():
                if not told.has_ended:
                    front_end.port.send(told.resumed(self.now))
            front_end.port.send(AllResumed())

    # The run

    def run(self) -> None:
        """Raises where anything is not as it should be."""
        log, logger = LogAboveInfo(), logging.getLogger("quire")
        logger.addHandler(log)
        try:
            self._begin_engine()
            for front_end in self.front_ends:
                front_end.port = self.driver.open(front_end.take, front_end.number)
            self._plan_arrivals()
            turn = 0
            while not self._is_over(turn):
                assert turn < MAX_TURNS, f"requests do not come to an end: {self._live()}"
                for action in self._actions.pop(turn, ()):
                    action()
                self._turn()
                turn += 1
            self._note_counters()
            self._check_answers()
            self._check_nothing_is_left()
        finally:
            logger.removeHandler(log)
        explained = [pattern for one in self.capabilities for pattern in one.explains]
        unexplained = [line for line in log.lines if not any(re.match(pattern, line) for pattern in explained)]
        assert not unexplained, f"nothing explains these lines of the log: {unexplained}"

    def _begin_engine(self) -> None:
        self.engine: Engine = self._bench.engine(self.setup, lambda: self.now, self.faults)
        self.driver = Driver(self.engine, gather=self.engine.take_over(self._journal))
        self.driver.start(own_thread=False)
        self.engine.page_sources.start(self.driver)

    def _plan_arrivals(self) -> None:
        turn = 0
        for number, draft in enumerate(self.drafts):
            turn += self.chance.choice([0, 0, 0, 1, 2, 6])
            self._at(turn, lambda number=number, draft=draft: self._submit(number, draft))

    def _submit(self, number: int, draft: RequestDraft) -> None:
        front_end = self.front_ends[number % 2]
        if not front_end.is_there:
            front_end = self.front_ends[1]
        request = self._bench.translated(draft.as_request(front_end.port.request_id(number + 1)))
        answers = [Answer() for _ in range(request.samples)]
        front_end.told[request.request_id] = Told(request, self.now, answers)
        front_end.port.send(Submit(request))

    def _take_time(self, plan, prompts) -> None:
        self.now += 0.001 + 0.0002 * plan.num_tokens

    def _turn(self) -> None:
        driver, engine = self.driver, self.engine
        self.now += TURN_S
        if driver.phase is Phase.STOPPED:
            return
        if driver._is_over():
            driver._end()
            return
        self._bench.between_turns()
        if driver._gathering and not driver._inbox and not driver._preparing:
            self.now += 2 * GATHER_S  # for requests of a front end that is gone
        if driver._is_idle() and not driver._inbox and not driver._gathering:
            if not (driver._preparing or engine.adapters._reading):
                return
            self._wait_for_threads()
        steps, had_some = engine.scheduler.counters.steps, engine.num_in_flight > 0
        driver.turn()
        engine.scheduler.check()
        assert driver._failure is None, driver._failure
        waits = driver._is_idle() or driver._preparing or driver._gathering or driver._inbox
        has_moved = engine.scheduler.counters.steps > steps or had_some
        assert waits or has_moved, f"requests are there and nothing happens: {self._live()}"

    def _wait_for_threads(self) -> None:
        """What requests wait for comes from another thread."""
        until_s = time.monotonic() + WAIT_S
        while not self.driver._inbox:
            assert time.monotonic() < until_s, "requests wait for ever for an adapter, a grammar or pages"
            time.sleep(0.0002)

    def _is_over(self, turn: int) -> bool:
        if self._actions or self._live():
            return False
        is_at_rest = self.driver._is_idle() and not self.driver._inbox and not self.engine.adapters._reading
        return is_at_rest or self.driver.phase is Phase.STOPPED

    def _live(self) -> list[Request]:
        return [told.request for one in self.front_ends for told in one.told.values() if not told.has_ended]

    def _note_counters(self) -> None:
        """What happened in the engine, the last one if others ended before it."""
        stats = self.engine.scheduler.stats()
        self.happened += Counter(
            {
                "preempted": stats.preemptions,
                "evicted": stats.evicted_pages,
                "reused": stats.cached_tokens,
                "restored": stats.restored_pages,
                "guessed": stats.right_guesses,
                "failed steps": self.engine.num_faults,
            }
        )

    # The assertions

    def _check_answers(self) -> None:
        for front_end in self.front_ends:
            for told in front_end.told.values():
                request, failed = told.request, told.failed
                if failed is not None:
                    is_excused = any(one.excuses(self, request, failed) for one in self.capabilities)
                    assert is_excused, f"{request} failed without a reason: {failed}"
                    self.happened[failed.kind] += 1
                elif not told.is_aborted:
                    self.happened["answered"] += 1
                    assert not request.timings or told.account is not None, "an account is missing"
                self._check_tokens(told)

    def _check_tokens(self, told: Told) -> None:
        request = told.request
        if not all(one.keeps_tokens for one in self.capabilities):
            return
        is_whole = told.failed is None and not told.is_aborted
        folder = None if told.begun_with is None else told.begun_with.folder
        for sample, answer in enumerate(told.answers):
            if answer.tokens or is_whole:
                expected = self._bench.expected(self.setup, request, sample, folder)
                right = expected.tokens if is_whole else expected.tokens[: len(answer.tokens)]
                assert answer.tokens == right, f"{request}, sample {sample}: {answer.tokens} in place of {right}"
                if is_whole:
                    self._bench.check_answer(request, sample, answer, expected)

    def _check_nothing_is_left(self) -> None:
        engine, driver = self.engine, self.driver
        for _ in range(3):  # the last steps of requests that have ended
            self._turn()
        scheduler = engine.scheduler
        running, adapters, stats = scheduler._running, scheduler.adapters, scheduler.stats()
        if driver.phase is not Phase.STOPPED or not self.is_draining:
            assert engine.is_idle
            assert not engine.num_in_flight
            assert engine.upkeep() == []  # which ends a search for a faulty request
            scheduler.check()
            assert scheduler.num_requests == scheduler.num_running == scheduler.num_waiting == 0
            assert running.is_balanced, "a page, a slot, a snapshot or a page of the host stays held"
            assert stats.free_pages + stats.cached_pages == scheduler.limits.num_pages - 1
            assert scheduler.repair(thorough=True) == []
            assert not adapters._users
            assert not adapters._holders
            assert adapters._reserved is None
            assert not engine._isolation.suspects()
            assert self._journal.read().running == []
            assert list(self._bench.left_behind(engine)) == []
        assert not any(driver._requests.values())
        assert not driver._preparing
        assert not engine.page_sources._reached
        assert not driver._times._waiting
        assert not driver._times._open
        assert not driver._traces._traced
