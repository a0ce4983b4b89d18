"""The engine's thread."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, NamedTuple

from quire.core.plan import Failure
from quire.engine.adapter_commands import AdapterCommand, AdapterCommands, AdapterRead
from quire.engine.engine import Engine
from quire.engine.idle_upkeep import IdleUpkeep
from quire.engine.outcome import Outcome, batches_of
from quire.engine.port import Deliver, Order, Port, Task
from quire.engine.preparations import Gathering, Preparations, Prepared
from quire.engine.queue_times import QueueTimes
from quire.engine.step_traces import StepTraces
from quire.errors import EngineFailed, EngineStopped, InvalidRequest, QuireError, RequestFailed, reason_of
from quire.ipc.messages import PORT_SHIFT, Abort, AllResumed, BegunWith, Command, Event, Failed, Queued, Submit

log = logging.getLogger(__name__)

MAX_COMMANDS_PER_TURN = 256  # so that a flood of requests delays the next step by milliseconds at most
AUDIT_AFTER_S = 5.0  # of idleness, every page is checked
CHECK_EVERY_S = 30.0  # of idleness, the device is checked

Message = Command | Order | Prepared | AdapterRead | Task
# Called with the reason, and whether it is known that no request is at fault.
Abandon = Callable[[str, bool], None]


class Stage(NamedTuple):
    """Something that a request waits for before the engine has it."""

    prepare: Callable[[Submit], "Future[Any] | None"]  # None: there is nothing to wait for. Raises why it is refused
    is_once: bool = False  # else it is called again when the future is done, until it returns None


class Phase(Enum):
    NEW = auto()
    RUNNING = auto()
    DRAINING = auto()  # finishes its requests, accepts no new ones
    STOPPED = auto()


class Driver:
    """Runs an engine on a thread of its own: takes commands, and delivers one batch of events per step to each port.

    Waits without spinning while there is nothing to do. Every submitted request gets an end, whatever goes wrong. The
    inbox is the only thing that threads share.
    """

    def __init__(
        self,
        engine: Engine,
        gather: Iterable[int] = (),
        abandon: Abandon | None = None,
        audit_after_s: float = AUDIT_AFTER_S,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        """No step runs before the requests of `gather` have come back, or its time has passed.

        `abandon` is called on the engine thread when the engine cannot continue, instead of failing its requests:
        another engine will answer them.
        """
        self.engine = engine
        self._clock = engine.clock
        self._gathering = Gathering(gather, self._clock)
        self._abandon = abandon
        self._idle_upkeep = IdleUpkeep(engine, audit_after_s, check_every_s)
        self._inbox: deque[tuple[Port, Message, float]] = deque()  # and when it was sent
        self._wake = threading.Condition()
        self.phase = Phase.NEW
        self._drain_until_s = 0.0
        self._failure: EngineFailed | None = None  # a defect of ours; the engine is not touched again
        self._num_opened = 0
        self._ports: dict[int, Port] = {}
        self._requests: dict[int, set[int]] = {}  # live requests by port
        self._preparing = Preparations(self._clock)  # live requests that the engine does not have yet
        self._accepted: set[int] = set()  # requests that were queued, which their clients have not been told
        self._times = QueueTimes()
        self._traces = StepTraces(self._clock)
        self._adapter_commands = AdapterCommands(engine.adapters, self.post)
        self._stages = (
            Stage(engine.adapters.prepare),
            Stage(lambda submit: engine.prepare(submit.request), is_once=True),
            Stage(lambda submit: engine.page_sources.prepare(submit.request)),
        )
        engine.observe(self._times)
        engine.observe(self._traces)
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)

    @property
    def is_gathering(self) -> bool:
        """True while it waits for requests to come back before it runs a step."""
        return bool(self._gathering)

    def open(self, deliver: Deliver, number: int | None = None) -> Port:
        """A port with this number, or a new number. It replaces an older port of that number and ends its requests."""
        with self._wake:
            self._num_opened = max(self._num_opened + 1, number or 0)
            port = Port(self.post, number or self._num_opened, deliver)
        self.post(port, Order.OPEN)
        return port

    def start(self, own_thread: bool = True) -> None:
        """Run on a thread, or where the owner calls `turn`."""
        with self._wake:
            if self.phase is not Phase.NEW:
                raise RuntimeError(f"the driver cannot be started, it is {self.phase.name.lower()}")
            self.phase = Phase.RUNNING
            if own_thread:
                self._thread.start()

    def stop(self, drain_s: float = 0.0, join_s: float = 5.0) -> bool:
        """Accept nothing new, give running requests `drain_s` to finish, fail the rest. Whether the thread has ended.

        Called again with less time, it waits less. The thread does not end if the executor never returns from a step.
        """
        with self._wake:
            until_s = self._clock() + drain_s
            if self.phase is Phase.RUNNING:
                self.phase = Phase.DRAINING
                self._drain_until_s = until_s
            elif self.phase is Phase.DRAINING:
                self._drain_until_s = min(self._drain_until_s, until_s)
            never_ran = self.phase is Phase.NEW
            self._wake.notify()
        if never_ran:
            self._end()
        elif self._thread.ident is not None:
            self._thread.join(drain_s + join_s)
        return not self._thread.is_alive()

    def post(self, port: Port, command: Message) -> None:
        with self._wake:
            if self.phase is not Phase.STOPPED:
                self._inbox.append((port, command, self._clock()))
                self._wake.notify()
                return
        if isinstance(command, Submit):
            port.deliver([Failed.from_error(command.request.request_id, EngineStopped("the engine has stopped"))])

    def _run(self) -> None:
        try:
            while not self._is_over():
                try:
                    self.turn()
                except Exception as error:  # all requests must hear of it, later ones too
                    log.exception("internal error in the engine thread")
                    if self._abandon is not None:
                        self._abandon(f"the engine failed: {error!r}", False)
                    self._failure = EngineFailed(f"the engine failed: {reason_of(error)}")
                    self._fail_everyone(self._failure)
        finally:  # also when the thread is made to exit
            self._end()

    def _end(self) -> None:
        """Fail every request that still waits for an answer."""
        self._fail_everyone(EngineStopped("the engine is shutting down"))
        with self._wake:
            self.phase = Phase.STOPPED
            left = list(self._inbox)
            self._inbox.clear()
        for port, command, _ in left:
            if isinstance(command, Submit):
                self._refuse(port, command, EngineStopped("the engine has stopped"))

    def _is_over(self) -> bool:
        if self.phase is not Phase.DRAINING:
            return False
        return not any(self._requests.values()) or self._clock() >= self._drain_until_s

    def turn(self) -> None:
        """Handle commands, keep the device busy, deliver the events of one step."""
        engine = self.engine
        self._wait_for_work()
        for _ in range(min(len(self._inbox), MAX_COMMANDS_PER_TURN)):  # one by one, so that none is lost if one raises
            self._obey(*self._inbox.popleft())
        if self._failure is not None or self._must_gather():
            return
        failures = engine.upkeep()
        if self._preparing:
            failures += self._preparing.expire()
        if failures:
            self._dispatch(Outcome([], failures))
        while engine.launch():
            pass
        self._tell_admissions()
        if engine.num_in_flight:
            self._dispatch(engine.collect())
            engine.delivered()

    def _must_gather(self) -> bool:
        """True while it should wait longer for requests of an engine that ended."""
        if not self._gathering:
            return False
        if self._gathering.must_wait(set(self._live_requests()), self._preparing) and self.phase is Phase.RUNNING:
            return True
        self._gathering.end()
        self._dispatch(Outcome([], self.engine.resume_search()))
        return False

    def _wait_for_work(self) -> None:
        """Only an idle engine waits: with requests there is always a step to launch or to collect."""
        if self._must_wait():
            self._idle_upkeep.begin()
        while self._must_wait():
            upkeep_in_s = self._idle_upkeep.run() if self._failure is None and not self._gathering else None
            self._abandon_if_broken()
            with self._wake:
                if self._must_wait():
                    waits_s = [wait_s for wait_s in (upkeep_in_s, self._due_in_s()) if wait_s is not None]
                    self._wake.wait(min(waits_s, default=None))

    def _abandon_if_broken(self) -> None:
        if self.engine.error is not None and self._abandon is not None:
            self._abandon(self.engine.error.message, True)

    def _must_wait(self) -> bool:
        if self._inbox or self.phase is not Phase.RUNNING or not (self._is_idle() or self._gathering):
            return False
        due_in_s = self._due_in_s()
        return due_in_s is None or due_in_s > 0

    def _due_in_s(self) -> float | None:
        """Seconds until gathering ends, or until the deadline of a request that is not in the engine yet."""
        gathering_s = self._gathering.due_in_s if self._gathering else None
        return self._preparing.due_in_s if gathering_s is None else gathering_s

    def _is_idle(self) -> bool:
        return self._failure is not None or self.engine.is_idle

    def _obey(self, port: Port, command: Message, sent_s: float) -> None:
        if command is Order.OPEN:
            self._abort_all(port.number)
            self._ports[port.number] = port
            if self.engine.adapters.version:
                self._deliver(port, [self._adapter_commands.table()])
        elif isinstance(command, Task):
            command.run()
        elif isinstance(command, AdapterRead):  # also for a port that was closed: others wait for it too
            self._obey_about_adapters(port, command)
        elif self._ports.get(port.number) is not port:
            return  # the port was closed
        elif isinstance(command, Submit):
            self._submit(port, command, sent_s)
        elif isinstance(command, Prepared):
            waited_s = self._preparing.waited_s(command.submit)
            if waited_s is not None:
                self._preparing.forget(command.submit.request.request_id)
                self._prepare(port, command.submit, waited_s, command.sent_s, command.stage)
        elif isinstance(command, Abort):
            if command.request_id in self._requests.get(port.number, ()):
                self._abort(command.request_id)
        elif isinstance(command, AllResumed):
            self._gathering.note_all_resumed(port.number)
        elif isinstance(command, AdapterCommand):
            self._obey_about_adapters(port, command)
        else:
            self._abort_all(port.number)
            del self._ports[port.number]

    def _obey_about_adapters(self, port: Port, command: AdapterCommand | AdapterRead) -> None:
        version = self.engine.adapters.version
        done = self._adapter_commands.handle(port, command)
        table = self._adapter_commands.table()
        if table.version != version:
            for other in list(self._ports.values()):
                self._deliver(other, [table])
        if done is not None and done.number and self._ports.get(port.number) is port:
            self._deliver(port, [done])

    def _abort_all(self, number: int) -> None:
        for request_id in self._requests.pop(number, set()).copy():
            self._abort(request_id)

    def _abort(self, request_id: int) -> None:
        self._forget(request_id)
        if self._failure is None:
            self.engine.abort(request_id)

    def _submit(self, port: Port, command: Submit, sent_s: float) -> None:
        request = command.request
        try:
            if self._failure is not None:
                raise self._failure
            if self.phase is not Phase.RUNNING:
                raise EngineStopped("the engine is shutting down")
            if request.request_id >> PORT_SHIFT != port.number:
                raise InvalidRequest(f"request_id {request.request_id} does not belong to port {port.number}")
            if request.request_id in self._requests.get(port.number, ()):
                raise InvalidRequest(f"request_id {request.request_id} is in use")
        except QuireError as refusal:
            self._refuse(port, command, refusal)
            return
        # Registered first: if the engine raises an internal error, this request gets it as well.
        self._requests.setdefault(port.number, set()).add(request.request_id)
        self._prepare(port, command, command.waited_s, sent_s)

    def _prepare(self, port: Port, command: Submit, waited_s: float, sent_s: float, stage: int = 0) -> None:
        """Add a request once its adapter is read, and then its grammar compiled, and then its pages received."""
        request_id = command.request.request_id
        try:
            for number, (prepare, is_once) in enumerate(self._stages[stage:], start=stage):
                preparing = prepare(command)
                if preparing is not None:
                    prepared = Prepared(command, sent_s, number + is_once)
                    self._preparing.begin(command, waited_s)
                    preparing.add_done_callback(lambda _, prepared=prepared: self.post(port, prepared))  # type: ignore[misc]
                    return
            self._add(port, command, waited_s, sent_s)
        except QuireError as refusal:
            self._forget(request_id)
            self._refuse(port, command, refusal)
        except Exception as error:  # caused by this request, as it does not run yet
            log.exception("request %d cannot be added", request_id)
            self._abort(request_id)
            self._refuse(port, command, RequestFailed(f"the engine cannot add this request: {reason_of(error)}"))

    def _add(self, port: Port, command: Submit, waited_s: float, sent_s: float) -> None:
        request = command.request
        self.engine.add(request, command.so_far, waited_s)
        self._accepted.add(request.request_id)
        self.engine.adapters.release(request.request_id)
        if request.adapter is not None and not request.adapter_digest:
            self._deliver(port, [BegunWith(request.request_id, *self.engine.adapters.current(request.adapter))])
        now, call = self._clock(), self.engine.observers.call
        call(self._times, self._times.add, request.request_id, sent_s, now, request.timings)
        if request.traced:
            call(self._traces, self._traces.add, request.request_id)

    def _refuse(self, port: Port, command: Submit, error: QuireError) -> None:
        self._deliver(port, [Failed.from_error(command.request.request_id, error)])

    def _fail_everyone(self, error: QuireError) -> None:
        """Fail all requests in the driver's own list, since the engine's may be wrong."""
        self._dispatch(Outcome([], [Failure(request_id, error) for request_id in self._live_requests()]))

    def _live_requests(self) -> list[int]:
        return [request_id for requests in self._requests.values() for request_id in requests]

    def _dispatch(self, outcome: Outcome) -> None:
        """Deliver one batch of events to each port."""
        self._abandon_if_broken()
        call = self.engine.observers.call
        accounts = call(self._times, self._times.accounts) or ()  # before requests are forgotten
        for request_id in outcome.finished:
            self._forget(request_id, is_finished=True)
        trace = call(self._traces, self._traces.event, outcome.failures)
        batches = batches_of(outcome, accounts, trace)
        for failure in outcome.failures:
            self._forget(failure.request_id)
        self._deliver_all(batches)

    def _tell_admissions(self) -> None:
        """Tell of requests that were accepted before the step under way has a result: a long prompt takes seconds."""
        started = self.engine.observers.call(self._times, self._times.started) or ()
        if not (self._accepted or started):
            return
        queued = self._accepted.difference(event.request_id for event in started)
        self._accepted.clear()
        self._deliver_all(batches_of(Outcome(), [*map(Queued, queued), *started], None))

    def _forget(self, request_id: int, is_finished: bool = False) -> None:
        self._preparing.forget(request_id)
        self._accepted.discard(request_id)
        self.engine.adapters.release(request_id)
        self.engine.page_sources.forget(request_id, is_finished)
        call = self.engine.observers.call
        call(self._times, self._times.forget, request_id)
        call(self._traces, self._traces.forget, request_id)
        self._requests.get(request_id >> PORT_SHIFT, set()).discard(request_id)

    def _deliver_all(self, batches: dict[int, list[Event]]) -> None:
        """By number of the port."""
        for number, events in batches.items():
            port = self._ports.get(number)
            if port is not None:
                self._deliver(port, events)

    def _deliver(self, port: Port, events: list[Event]) -> None:
        try:
            port.deliver(events)
        except Exception:  # the front end is gone or broken, so its requests are useless
            log.exception("port %d cannot be delivered to and is closed", port.number)
            port.close()
