"""Two servers, prefill here and decode there: the same tokens, whatever becomes of the prefill server."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.server import wait_until
from tests.chaos.test_model import write_poisoned_model
from tests.peers.servers import Pair
from tests.tiny_chat_model import program_folder

pytestmark = pytest.mark.xdist_group("peers")
LONG = pytest.mark.skipif(os.environ.get("QUIRE_PEERS_TESTS") != "long", reason="takes its time; `make test-peers`")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = write_poisoned_model(tmp_path_factory.mktemp("tiny"))
    one = Pair(model, program_folder(tmp_path_factory))
    yield one
    one.stop()


def test_a_prompt_that_another_server_computes_gives_the_same_tokens(pair: Pair):
    for number in range(4):
        pair.check(number, "received")
    assert pair.decode.count("quire_peer_pages", direction="received") > 4 * 30
    wait_until(lambda: pair.prefill.count("quire_peer_prefills", outcome="sent") == 4)
    assert pair.prefill.count("quire_peer_bytes", direction="sent") > 0


def test_a_peer_that_is_killed_before_it_is_asked_is_done_without(pair: Pair):
    pair.wait_until_asked_again(100)
    expected = pair.prefill.answer(10)
    assert pair.prefill.kill("quire-engine")
    assert pair.decode.answer(10) == expected
    wait_until(lambda: pair.decode.pulls("lost") + pair.decode.pulls("received") >= 1)
    pair.wait_until_asked_again(200)


def test_a_peer_that_is_killed_while_it_sends_is_done_without(pair: Pair):
    pair.wait_until_asked_again(300)
    expected = pair.prefill.answer(11)
    before = pair.decode.pulls("lost")
    pair.proxy.cut()
    pair.proxy.block()  # what it sends does not arrive
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(pair.decode.answer(11)))
    asking.start()
    wait_until(lambda: pair.proxy.num_open > 0)
    assert pair.prefill.kill("quire-engine")
    pair.proxy.unblock()
    asking.join()
    assert answers == [expected]
    wait_until(lambda: pair.decode.pulls("lost") > before)


def test_a_peer_that_is_killed_after_it_has_sent_is_not_needed(pair: Pair):
    pair.wait_until_asked_again(700)
    pair.check(17, "received")
    expected = pair.prefill.answer(17, max_tokens=40)
    assert pair.prefill.kill("quire-engine")
    assert pair.decode.answer(17, max_tokens=40) == expected


@LONG
def test_a_peer_that_stands_still_is_done_without(pair: Pair):
    pair.wait_until_asked_again(400)
    expected = pair.prefill.answer(12)
    (engine,) = pair.prefill.processes("quire-engine")
    os.kill(engine, signal.SIGSTOP)
    try:
        assert pair.decode.answer(12) == expected
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: pair.decode.pulls("lost") > 0)
    pair.wait_until_asked_again(500)


@LONG
def test_a_decode_server_that_is_killed_while_it_pulls_leaves_nothing_behind(pair: Pair):
    pair.wait_until_asked_again(600)
    pair.proxy.cut()
    pair.proxy.block()
    asking = threading.Thread(target=lambda: pair.decode.answer(13))
    asking.start()
    wait_until(lambda: pair.proxy.num_open > 0)
    assert pair.decode.kill("quire-engine")
    pair.proxy.unblock()
    asking.join()  # the next engine answers
    metrics = pair.prefill.wait_until_idle()
    assert metrics["quire_pages_active"] == 0
    pair.check(14)


@LONG
def test_a_peer_of_other_weights_is_refused_by_name(pair: Pair, tmp_path):
    other = write_poisoned_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    decode = pair.start_decode(other)
    try:
        decode.answer(15)
        wait_until(lambda: decode.pulls("differs") == 1)
        wait_until(lambda: bool(decode.logged("model of the decode server")))
    finally:
        decode.stop()


@LONG
def test_a_peer_with_another_secret_is_done_without(pair: Pair):
    decode = pair.start_decode(pair.model, secret="another secret that is long enough")
    try:
        assert decode.answer(16) == pair.prefill.answer(16)
        wait_until(lambda: decode.pulls("lost") == 1)
    finally:
        decode.stop()
