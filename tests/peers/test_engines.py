"""A decode engine that lets another one compute its prompts: the tokens are those of computing them itself."""

import threading
from itertools import count

import pytest

from quire.engine.pages import traffic as page_traffic
from quire.engine.pages.peers import Prefills
from quire.ipc.messages import Abort, Submit
from quire.peers.messages import PrefillRequest
from quire.peers.prefill_server import RefusedPrompt
from tests.core.harness import request
from tests.engine.test_driver import wait_until
from tests.fake_executor import expected_tokens
from tests.fake_host_pages import PLACE_BYTES
from tests.patience import WAIT_S
from tests.peers.engines import PAGE_SIZE, PeerEngine
from tests.peers.exchange import FACTS

LONG = tuple(range(3, 45))  # 42 tokens, 10 pages


@pytest.fixture
def engines():
    made: list[PeerEngine] = []

    def make(*endpoints, **options) -> PeerEngine:
        made.append(PeerEngine(*endpoints, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize("groups", [(None,), (None, 9), (9,), (5, None, 17)])
def test_a_prompt_that_a_peer_computes_gives_the_same_tokens(engines, groups):
    prefill = engines(answers=True, page_groups=groups)
    decode = engines(prefill.endpoint, page_groups=groups)
    asked = decode.submit(LONG, max_tokens=9)
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert decode.client.counters["received"] == 1
    assert decode.computed_tokens <= len(LONG) - 10 * PAGE_SIZE + 1
    assert prefill.computed_tokens == len(LONG)
    wait_until(lambda: prefill.server.counters["served_sent"] == 1)
    assert prefill.server.counters["sent_pages"] == decode.client.counters["received_pages"] > 0


def test_pages_that_are_here_are_not_asked_for(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint)
    decode.answer(LONG)
    assert decode.answer(LONG) == expected_tokens(decode.submit(LONG))
    assert decode.client.counters["received"] == 1
    longer = LONG + tuple(range(40))
    decode.answer(longer)
    assert decode.client.counters["received"] == 2
    assert decode.client.counters["received_pages"] == 10 + (len(longer) // PAGE_SIZE - 10)


def test_short_prompts_are_computed_here(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint)
    asked = decode.submit(LONG[:8])
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert prefill.computed_tokens == 0


def test_prompts_whose_log_probabilities_are_wanted_are_computed_here(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint)
    decode.answer(LONG, prompt_logprobs=1)
    assert prefill.computed_tokens == 0


def test_requests_with_other_salts_share_no_pages_at_the_peer_either(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint)
    for salt in ("one", "other", "\ud800"):
        asked = decode.submit(LONG, salt=salt)
        decode.front_end.wait_for(asked)
        assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert prefill.computed_tokens == 3 * len(LONG)
    assert decode.client.counters["received"] == 3


def test_both_engines_may_ask_each_other_without_end(engines):
    first = engines(answers=True)
    both = engines(first.endpoint, answers=True)
    third = engines(both.endpoint)
    asked = third.submit(LONG)
    third.front_end.wait_for(asked)
    assert third.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert first.computed_tokens == 0, "a prompt of a peer is computed by the one that was asked"
    assert both.computed_tokens == len(LONG)


def test_a_prompt_with_an_adapter_is_computed_by_a_peer_that_has_the_same(engines):
    prefill = engines(answers=True, adapters={"tuned": "1"})
    decode = engines(prefill.endpoint, adapters={"tuned": "1"})
    wait_until(lambda: decode.engine.adapters.digest_of("tuned") == prefill.engine.adapters.digest_of("tuned"))
    asked = decode.submit(LONG, adapter="tuned")
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked, adapter=1)
    assert decode.client.counters["received"] == 1


def test_an_adapter_of_other_weights_is_computed_here(engines):
    prefill = engines(answers=True, adapters={"tuned": "2"})
    decode = engines(prefill.endpoint, adapters={"tuned": "1"})
    for one in (decode, prefill):
        wait_until(lambda one=one: one.engine.adapters.digest_of("tuned") is not None)
    asked = decode.submit(LONG, adapter="tuned")
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked, adapter=1)
    assert decode.client.counters["refused"] == 1
    assert prefill.computed_tokens == 0


def test_an_adapter_that_is_replaced_while_its_pages_come_is_computed_here(engines):
    release = threading.Event()
    prefill = engines(answers=True, adapters={"tuned": "1"}, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint, adapters={"tuned": "1"})
    for one in (decode, prefill):
        wait_until(lambda one=one: one.engine.adapters.digest_of("tuned") is not None)
    asked = decode.submit(LONG, adapter="tuned")
    wait_until(lambda: prefill.server.num_asked == 1)
    decode.engine.adapters.load("tuned", "2")  # while nothing runs there
    release.set()
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked, adapter=2)
    assert decode.engine.page_sources.counters()["peer_pulls_unused"] == 1


def test_a_peer_that_ends_while_it_computes_with_an_adapter_is_done_without(engines):
    release = threading.Event()
    prefill = engines(answers=True, adapters={"tuned": "7"}, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint, adapters={"other": "8", "tuned": "7"})
    asked = [decode.submit(LONG, adapter=adapter) for adapter in ("tuned", "other", None)]
    wait_until(lambda: prefill.server.num_asked >= 1)
    prefill.server.close()
    for one, weights in zip(asked, (7, 8, 0), strict=True):
        decode.front_end.wait_for(one)
        assert decode.front_end.tokens[one.request_id] == expected_tokens(one, adapter=weights)
    release.set()


def test_a_request_that_began_with_an_adapter_that_was_replaced_has_pages_of_that_one(engines):
    """It comes from an engine that was killed: the peer has the adapter still, this one has another of the name."""
    prefill = engines(answers=True, adapters={"tuned": "7"})
    decode = engines(prefill.endpoint, adapters={"tuned": "8"})
    for number, folder, weights, received in ((1, "7", 7, 1), (2, "8", 8, 1)):
        begun = request(
            decode.front_end.port.request_id(number), prompt=LONG, adapter="tuned", adapter_digest=repr(weights)
        )
        tokens = expected_tokens(begun, adapter=weights)
        decode.front_end.port.send(Submit(begun, [tokens[:1]], adapter_folder=folder))
        decode.front_end.wait_for(begun)
        assert decode.front_end.tokens[begun.request_id] == tokens[1:]
        assert decode.client.counters["received"] == received
    assert list(decode.engine.adapters.folders.values()) == ["8"]
    assert len(decode.executor.adapters) == 1, "the one that was loaded for it stays"


def test_prompts_that_begin_alike_and_are_asked_for_together_have_their_own_pages_too(engines, monkeypatch):
    """Those of the second begin with pages that the first has brought meanwhile."""
    monkeypatch.setattr(page_traffic, "INSERTED_BYTES", 2 * PAGE_SIZE * PLACE_BYTES)  # of five for each of them
    release = threading.Event()
    prefill = engines(answers=True, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint)
    asked = [decode.submit(LONG[:21] + tail) for tail in (LONG[21:], LONG[:21], LONG[21:])]
    wait_until(lambda: prefill.server.num_asked == 3)
    release.set()
    for one in asked:
        decode.front_end.wait_for(one)
        assert decode.front_end.tokens[one.request_id] == expected_tokens(one)
    assert decode.computed_tokens <= 3 * (len(LONG) - 10 * PAGE_SIZE)
    counters = decode.engine.page_sources.counters()
    assert (counters["peer_pulls_received"], counters["peer_pulls_unused"]) == (2, 1), "one has none of its own"


def test_pages_of_an_adapter_that_gets_a_replaced_ones_name_are_not_sent_for_it(engines):
    one = engines(adapters={"tuned": "1"})
    digest_of = one.engine.adapters.digest_of
    wait_until(lambda: digest_of("tuned") is not None)
    wanted = PrefillRequest(FACTS, list(LONG), b"", "tuned", digest_of("tuned"), 0, WAIT_S, 0)
    computed = Prefills(one.driver, one.store, digest_of).begin(wanted).result.result(WAIT_S)
    assert computed.read(0, 1)
    one.engine.adapters.load("tuned", "2")  # while nothing runs there
    one.answer(LONG, adapter="tuned")
    with pytest.raises(RefusedPrompt, match="its adapter replaced"):
        computed.read(1, 9)


def test_a_peer_that_takes_too_long_is_not_waited_for(engines):
    release = threading.Event()
    prefill = engines(answers=True, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint, timeout_s=0.2)
    asked = decode.submit(LONG)
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert decode.computed_tokens == len(LONG)
    release.set()
    wait_until(lambda: prefill.server.num_asked == 0)
    wait_until(lambda: not prefill.engine.scheduler.num_requests)


def test_a_request_that_is_aborted_meanwhile_is_given_up_at_the_peer(engines):
    release = threading.Event()
    prefill = engines(answers=True, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint)
    gone = decode.submit(LONG)
    wait_until(lambda: prefill.server.num_asked == 1)
    decode.front_end.port.send(Abort(gone.request_id))
    wait_until(lambda: prefill.server.num_asked == 0)
    release.set()
    wait_until(lambda: not prefill.engine.scheduler.num_requests)
    assert decode.computed_tokens == 0
    assert decode.answer(LONG[:6]) == expected_tokens(decode.submit(LONG[:6]))


def test_the_deadline_of_a_request_leaves_time_to_compute_it_here(engines):
    release = threading.Event()
    prefill = engines(answers=True, before_result=lambda *_: release.wait(WAIT_S))
    decode = engines(prefill.endpoint)
    asked = decode.submit(LONG, timeout_s=8.0)
    decode.front_end.wait_for(asked)
    release.set()
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    wait_until(lambda: decode.client.counters["late"] == 1)  # the request did not wait for the thread that counts


def test_pages_for_which_there_is_no_room_are_not_asked_for(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint, host_pages=18)  # half of them are fewer than 10
    asked = decode.submit(LONG)
    decode.front_end.wait_for(asked)
    assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
    assert prefill.computed_tokens == 0


def test_a_peer_that_stopped_is_left_alone_and_asked_again_later(engines):
    prefill = engines(answers=True)
    decode = engines(prefill.endpoint)
    prefill.server.close()
    starts = count()

    def is_left_alone() -> bool:
        """The next prompt is computed. A slow machine asks only when the pause is over; the next one is longer."""
        start = next(starts) % 40
        asked = decode.submit(range(start, start + 40))
        decode.front_end.wait_for(asked)
        assert decode.front_end.tokens[asked.request_id] == expected_tokens(asked)
        return decode.client.counters["no_peer"] >= 1

    wait_until(is_left_alone)
    assert decode.client.counters["lost"] >= 1


def test_many_prompts_of_one_peer_meet_an_engine_that_is_short_of_pages(engines):
    prefill = engines(answers=True, num_pages=34, host_pages=30, max_sequence_tokens=100)
    decode = engines(prefill.endpoint, num_pages=34, max_sequence_tokens=100)
    asked = [decode.submit(range(start, start + 44), max_tokens=12) for start in range(0, 6)]
    asked += [decode.submit(range(start, start + 44), max_tokens=12) for start in range(0, 6)]
    decode.front_end.wait_for(*asked)
    for one in asked:
        assert decode.front_end.tokens[one.request_id] == expected_tokens(one)
    decode.engine.scheduler.check()
    prefill.engine.scheduler.check()
