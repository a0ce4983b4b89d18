"""Two processes that are one engine, and the end of either: streams go on with the tokens of an undisturbed run."""

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chaos.asking import Asking
from tests.chaos.clients import stream_all
from tests.chaos.server import Server, wait_until
from tests.chaos.test_model import POISON, poison_id, write_poisoned_model
from tests.group.members import Group
from tests.tiny_chat_model import program_folder

pytestmark = pytest.mark.xdist_group("group")


def body(number: int) -> dict[str, Any]:
    never = {"logit_bias": {str(poison_id()): -100}}
    return {"prompt": f"number {number}", "max_tokens": 96, "temperature": number % 2, "seed": number} | never


# Few programs: each member compiles all of them.
SIZES = {"max_batch_size": 2, "max_batch_prefill_tokens": 8, "page_size": 8, "max_total_tokens": 128}
BODIES = [body(number) for number in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_poisoned_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What one process on one device says."""
    config = SIZES | {"dtype": "float32", "cache_dir": str(program_folder(tmp_path_factory))}
    alone = Server("model", model, config=config).wait()
    heard = asyncio.run(stream_all(alone.url, BODIES))
    alone.stop()
    assert all(one.is_complete for one in heard)
    return [one.texts for one in heard]


@pytest.fixture(scope="module")
def group(model: str, expected: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Started after the one process, which has built the native library for all."""
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    one = Group(model, *sizes, "--cache-dir", str(program_folder(tmp_path_factory)), "--restart-after-s", "60")
    yield one
    one.stop()


def check_all(asking: Asking, expected: list[list[str]]) -> None:
    for number, one in enumerate(asking.wait().heard):
        assert one.error is None, one.error
        assert one.texts == expected[number], f"request {number}"
        assert one.is_complete


def restarts(group: Group) -> float:
    group.leader.wait_until_healthy()
    wait_until(lambda: "quire_engine_restarts" in group.leader.metrics())
    return group.leader.metrics()["quire_engine_restarts"]


def check_no_blame(group: Group) -> None:
    metrics = group.leader.wait_until_idle()
    assert metrics["quire_faults_isolated"] == 0
    assert metrics["quire_step_faults"] == 0, "the end of a member is the fault of no request"


@contextmanager
def streams_that_go_on(group: Group, expected: list[list[str]]) -> Iterator[None]:
    """Streams have begun when the block does its harm. They end as expected, and the group has begun again."""
    before = restarts(group)
    asking = Asking(group.leader, BODIES)
    asking.wait_for_text()
    yield
    check_all(asking, expected)
    assert restarts(group) >= before + 1


def test_two_processes_say_what_one_does(group: Group, expected: list[list[str]]) -> None:
    group.leader.wait_until_healthy()
    check_all(Asking(group.leader, BODIES), expected)
    group.leader.wait_for_log("cut across 2 devices of 2 members (1, 1)")
    assert group.leader.wait_until_idle()["quire_late_compilations"] == 0


def test_requests_that_fail_alone_or_follow_a_grammar_do_so_in_a_group(group: Group, expected: list[list[str]]) -> None:
    before = restarts(group)
    faulty = BODIES[0] | {"prompt": f"number {POISON}"}
    guided = BODIES[1] | {"guided_regex": "[ab]{8}"}
    heard = asyncio.run(stream_all(group.url, [*BODIES, faulty, guided]))
    assert [one.texts for one in heard[:3]] == expected
    assert heard[3].error is not None
    assert "logits are not finite" in heard[3].error["error"]["message"]
    assert re.fullmatch("[ab]{8}", heard[4].texts[0])
    assert restarts(group) == before


def test_streams_go_on_when_the_follower_is_killed(group: Group, expected: list[list[str]]) -> None:
    with streams_that_go_on(group, expected):
        group.kill_follower()
    check_no_blame(group)


def test_an_idle_group_begins_again_when_the_follower_is_killed(group: Group, expected: list[list[str]]) -> None:
    before = restarts(group)
    group.kill_follower()
    wait_until(lambda: "started again" in group.reason() or "member" in group.reason() or "loads" in group.reason())
    check_all(Asking(group.leader, BODIES), expected)  # requests wait for the group
    assert restarts(group) >= before + 1


def test_streams_go_on_when_the_follower_stands_still(group: Group, expected: list[list[str]]) -> None:
    with streams_that_go_on(group, expected):
        group.kill_follower(signal.SIGSTOP)  # its supervisor ends it, and starts another
    group.leader.wait_for_log("it has not been heard of for")
    check_no_blame(group)


def test_streams_go_on_when_the_link_is_cut(group: Group, expected: list[list[str]]) -> None:
    with streams_that_go_on(group, expected):
        group.proxy.cut()
    check_no_blame(group)


def test_streams_go_on_when_nothing_passes_the_link(group: Group, expected: list[list[str]]) -> None:
    lost = len(group.follower.logged("the leader at"))
    with streams_that_go_on(group, expected):
        group.proxy.block()
        wait_until(lambda: "waiting for member 1 of 2" in group.reason())
        wait_until(lambda: len(group.follower.logged("the leader at")) > lost)
        group.proxy.unblock()
    check_no_blame(group)


def test_streams_go_on_when_the_engine_of_the_leader_is_killed(group: Group, expected: list[list[str]]) -> None:
    with streams_that_go_on(group, expected):
        assert group.leader.kill("quire-engine")


def test_a_follower_waits_for_the_next_leader(group: Group, expected: list[list[str]]) -> None:
    group.leader.process.kill()
    group.leader.process.wait()
    group.follower.wait_for_log("waiting for the leader at")
    group.start_leader()
    group.leader.wait_until_healthy()
    check_all(Asking(group.leader, BODIES), expected)
