"""Asking the process that compiles grammars."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quire.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded
from quire.grammar.checker import answer_line
from quire.grammar.checking import MAX_WAITING
from quire.request import Request, SamplingParams, json_schema, regex
from quire.server.offload import Offload
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.service.grammar_check import GrammarCheck
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.processes import wait_until
from tests.server.vocabulary import served_model

SLOW = json_schema({"type": "integer", "multipleOf": 999983})  # is given up after a second


def run(work: Callable[[GrammarCheck], Awaitable[None]]) -> None:
    async def whole() -> None:
        check = GrammarCheck(Offload())
        try:
            await work(check)
            check.checking.check()
        finally:
            check.checking.close()

    asyncio.run(whole())


def test_identical_grammars_are_asked_about_once() -> None:
    async def work(check: GrammarCheck) -> None:
        count = MAX_WAITING + 20  # more than may wait, were they different
        await asyncio.gather(*(check.refuse_what_cannot_be_followed("grammar", regex("ab{3}")) for _ in range(count)))
        assert check.checking.num_submitted == 1
        await check.refuse_what_cannot_be_followed("grammar", regex("ab{3}"))
        assert check.checking.num_submitted == 1

    run(work)


def test_a_wrong_grammar_is_refused_to_every_request_that_has_it() -> None:
    async def work(check: GrammarCheck) -> None:
        asked = (check.refuse_what_cannot_be_followed(f"n{number}", regex("(a")) for number in range(5))
        for number, fault in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
            assert isinstance(fault, InvalidRequest)
            assert fault.message.startswith(f"n{number} cannot be followed")
        assert check.checking.num_submitted == 1

    run(work)


def test_a_request_that_leaves_takes_no_verdict_from_others() -> None:
    async def work(check: GrammarCheck) -> None:
        first = asyncio.create_task(check.refuse_what_cannot_be_followed("grammar", SLOW))
        second = asyncio.create_task(check.refuse_what_cannot_be_followed("grammar", SLOW))
        while not check.checking.num_submitted:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(InvalidRequest, match="too complex"):
            await second
        assert first.cancelled()
        assert check.checking.num_submitted == 1

    run(work)


def test_requests_that_leave_make_no_room_for_more_work() -> None:
    """The process still works on what they asked."""

    async def work(check: GrammarCheck) -> None:
        left = []
        for number in range(MAX_WAITING):
            asked = json_schema({"type": "integer", "multipleOf": 999983 + number})
            left.append(asyncio.create_task(check.refuse_what_cannot_be_followed("grammar", asked)))
        while check.checking.num_submitted < MAX_WAITING:
            await asyncio.sleep(0)
        for task in left:
            task.cancel()
        with pytest.raises(Overloaded, match=f"the limit is {MAX_WAITING}"):
            await check.refuse_what_cannot_be_followed("grammar", regex("a"))

    run(work)


def checkers(parent: int) -> list[int]:
    """Processes that `parent` has started to check grammars."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            started_by = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if started_by == parent and b"quire.grammar.checker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


def test_a_process_that_ends_fails_those_that_wait_and_is_started_again() -> None:
    others = checkers(os.getpid())  # of servers that other tests have left running in this process

    async def work(check: GrammarCheck) -> None:
        await check.refuse_what_cannot_be_followed("grammar", regex("ab"))
        (process,) = set(checkers(os.getpid())) - set(others)
        ending = checkers(process)  # may be there for a moment after its answer
        waits = [
            asyncio.create_task(check.refuse_what_cannot_be_followed("grammar", grammar)) for grammar in (SLOW, SLOW)
        ]
        while not set(checkers(process)) - set(ending):  # until it works on the grammar
            await asyncio.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        for fault in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(fault, EngineFailed)
            assert fault.retry_after_s is not None
        await check.refuse_what_cannot_be_followed("grammar", regex("cd"))
        with pytest.raises(InvalidRequest, match="too complex"):
            await check.refuse_what_cannot_be_followed("grammar", SLOW)
        (next_process,) = set(checkers(os.getpid())) - set(others)
        assert next_process != process

    run(work)


def test_a_costly_grammar_does_not_hold_up_the_next_ones() -> None:
    async def work(check: GrammarCheck) -> None:
        verdicts: list[str] = []

        async def ask(number: int) -> None:
            await check.refuse_what_cannot_be_followed("grammar", regex(f"a{{{number}}}"))
            verdicts.append("good")

        async def ask_slow() -> None:
            with pytest.raises(InvalidRequest, match="too complex"):
                await check.refuse_what_cannot_be_followed("grammar", SLOW)
            verdicts.append("slow")

        slow = asyncio.create_task(ask_slow())
        while not check.checking.num_submitted:
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(number) for number in range(10)))
        await slow
        assert verdicts == ["good"] * 10 + ["slow"]

    run(work)


def test_the_check_of_a_grammar_ends_with_the_time_of_its_request() -> None:
    async def ask() -> None:
        service = Service(served_model(end_ids=(0,)), ServerSettings(request_timeout_s=10.0))
        request = Request(0, (1,), 1, SamplingParams(), end_ids=(0,))
        asked = GenerationSpec(request, unchecked_grammar=NamedGrammar("response_format", SLOW))
        came_before = Arrival({}, opened_s=time.monotonic() - 9.9)
        try:
            with pytest.raises(
                DeadlineExceeded,
                match=r"the limit of 10 s, --request-timeout-s, passed before response_format was checked",
            ):
                await service.grammar_check.check([asked], came_before.times)
        finally:
            service.grammar_check.checking.close()

    asyncio.run(ask())


@pytest.mark.parametrize("character", ["a", "\0", '"', "😀", "\ud800"])
def test_answers_of_children_that_write_to_one_pipe_do_not_mix(character: str) -> None:
    """A pipe takes so many bytes as a whole. Errors repeat what is wrong in a grammar, in whatever script it is."""
    line = answer_line(2**63, character * 5000)
    assert len(line) <= select.PIPE_BUF
    assert json.loads(line)["id"] == 2**63


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists processes")
def test_a_checker_whose_parent_was_killed_ends_without_a_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.grammar.checker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(json.dumps({"id": 1, "kind": SLOW.kind, "text": SLOW.text}).encode() + b"\n")
    process.stdin.flush()
    wait_until(lambda: bool(checkers(process.pid)))
    wait_until(lambda: not checkers(process.pid))  # it has answered, to nobody
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(WAIT_S) == 0
