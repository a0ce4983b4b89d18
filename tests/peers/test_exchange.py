"""Pages arrive as they were sent, or not at all; nothing that a peer does is more than the lack of its pages."""

import contextlib
import os
import socket
import threading
import time

import pytest

from quire.group.handshake import HandshakeFailed, admit, enter
from quire.group.link import Link, LinkLost
from quire.peers import page_client, prefill_server
from quire.peers.bundle import PageForm
from quire.peers.messages import BUSY, FAILED, PURPOSE, Computed, Computing, FromDecode, PrefillRequest
from quire.peers.page_client import PageClient
from quire.peers.prefill_server import RefusedPrompt
from tests.engine.test_driver import wait_until
from tests.patience import WAIT_S
from tests.peers import exchange
from tests.peers.exchange import FACTS, FORM, SECRET, PrefillEnd, bundle_of, client_of, prompt

WINDOWED = PageForm(4, 1000, (None, 9, None))


@pytest.mark.parametrize("form", [FORM, WINDOWED])
@pytest.mark.parametrize("first", [0, 3])
def test_pages_arrive_as_they_were_sent(form, first):
    peer = PrefillEnd(form=form)
    client = client_of(peer.endpoint, form=form)
    asked = prompt(43, first, salt="\ud800 any", adapter="a", adapter_digest="d", priority=7)
    bundle = client.fetch(asked, WAIT_S).result.result(WAIT_S)
    assert bundle == bundle_of(asked.tokens, first, form)
    ask = peer.asked[0].ask
    assert (tuple(ask.tokens), ask.salt, ask.adapter, ask.adapter_digest) == (
        asked.tokens,
        b"\xed\xa0\x80 any",
        "a",
        "d",
    )
    assert (ask.first, ask.priority) == (first, 7)
    assert client.counters["received"] == 1
    assert client.counters["received_pages"] == bundle.range.num_pages
    assert client.counters["received_bytes"] == 1000 * bundle.range.num_pages
    wait_until(lambda: peer.server.counters["served_sent"] == 1)
    assert peer.server.counters["sent_pages"] == bundle.range.num_pages
    assert (peer.server.num_asked, peer.server.held_bytes) == (0, 0)


def test_a_hundred_megabytes_arrive_in_one_go():
    form = PageForm(4, 10 * 2**20, (None,))
    peer = PrefillEnd(form=form)
    bundle = client_of(peer.endpoint, form=form).fetch(prompt(40), WAIT_S).result.result(WAIT_S)
    assert bundle is not None
    assert bundle.data == bundle_of(range(40), 0, form).data
    assert len(bundle.data) == 100 * 2**20


@pytest.mark.parametrize("kind", ["Thread", "Timer"])
def test_a_system_without_threads_for_a_while_costs_one_prompt_its_pages(monkeypatch, kind):
    peer = PrefillEnd()
    client = client_of(peer.endpoint)

    class NoThread(getattr(threading, kind)):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(page_client.threading, kind, NoThread)
        if kind == "Thread":
            with pytest.raises(RuntimeError):
                client.fetch(prompt(43), WAIT_S)
        else:
            assert client.fetch(prompt(43), WAIT_S).result.result(WAIT_S) is None
    for _ in range(page_client.MAX_FETCHES + 1):
        assert client.fetch(prompt(43), WAIT_S).result.result(WAIT_S) is not None


def test_a_prefill_server_without_threads_for_a_while_answers_later(monkeypatch):
    peer = PrefillEnd()
    num_refused = 2 * prefill_server.MAX_STRANGERS

    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(prefill_server.threading, "Thread", NoThread)
        for _ in range(num_refused):
            with socket.create_connection(peer.endpoint, timeout=WAIT_S) as connection:
                assert connection.recv(1) == b""  # closed at once
    assert client_of(peer.endpoint).fetch(prompt(43), WAIT_S).result.result(WAIT_S) is not None


def test_a_peer_with_another_secret_is_not_believed():
    peer = PrefillEnd(secret=b"another secret of some length")
    client = client_of(peer.endpoint)
    assert client.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert client.counters["lost"] == 1
    assert peer.asked == []
    wait_until(lambda: peer.server.counters["strangers"] == 1)


def test_a_member_of_a_group_with_the_same_secret_is_no_peer():
    peer = PrefillEnd()
    with socket.create_connection(peer.endpoint) as connection, pytest.raises(HandshakeFailed):
        enter(connection, SECRET)


def test_a_peer_of_other_weights_refuses_by_name(caplog):
    peer = PrefillEnd(facts=FACTS | {"model": "another"})
    client = client_of(peer.endpoint, clock=lambda: 0.0)  # no time passes while it is left alone
    assert client.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert client.counters["differs"] == 1
    assert peer.asked == []
    assert "model of the decode server: 'tiny'; of the prefill server: 'another'" in caplog.text
    assert client.fetch(prompt(), WAIT_S) is None, "it is left alone for a while"
    assert client.counters["no_peer"] == 1


@pytest.mark.parametrize("kind", [BUSY, FAILED])
def test_a_prompt_that_is_refused_is_computed_here(kind):
    peer = PrefillEnd()
    peer.refusal = RefusedPrompt(kind, "not now")
    client = client_of(peer.endpoint)
    assert client.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert client.counters[{BUSY: "busy", FAILED: "refused"}[kind]] == 1
    wait_until(lambda: peer.server.counters[f"served_{kind}"] == 1)


def test_a_prompt_that_fails_at_the_peer_is_computed_here():
    peer = PrefillEnd(at_once=False)
    client = client_of(peer.endpoint)
    fetch = client.fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    peer.asked[0].result.set_exception(RefusedPrompt(FAILED, "its steps fail"))
    assert fetch.result.result(WAIT_S) is None
    assert client.counters["refused"] == 1


def test_pages_that_were_evicted_before_they_were_sent_are_computed_here(monkeypatch):
    monkeypatch.setattr(prefill_server, "READ_BYTES", 4000)
    peer = PrefillEnd(at_once=False)
    client = client_of(peer.endpoint)
    fetch = client.fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    computed = exchange.Computed(bundle_of(range(40), 0), 1000)
    computed.gone_from = 7
    peer.asked[0].result.set_result(computed)
    assert fetch.result.result(WAIT_S) is None
    assert client.counters["refused"] == 1
    assert client.counters["received_pages"] == 4


def test_a_peer_that_takes_longer_than_it_has_is_not_waited_for():
    peer, within_s = PrefillEnd(at_once=False), 0.2
    while not peer.asked:  # a busy machine may need more time to ask
        client = client_of(peer.endpoint)
        fetch = client.fetch(prompt(), within_s)
        assert fetch.result.result(WAIT_S) is None
        within_s *= 2
    wait_until(lambda: client.counters["late"] == 1)
    assert peer.asked[0].cancelled.wait(WAIT_S), "the prompt is given up"
    wait_until(lambda: (peer.server.num_asked, peer.server.held_bytes) == (0, 0))


def test_a_prompt_that_is_not_wanted_any_more_is_given_up_by_the_peer():
    peer = PrefillEnd(at_once=False)
    client = client_of(peer.endpoint)
    fetch = client.fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    fetch.cancel()
    assert fetch.result.result(WAIT_S) is None
    assert peer.asked[0].cancelled.wait(WAIT_S)
    wait_until(lambda: client.counters["cancelled"] == 1)
    assert client.fetch(prompt(), WAIT_S) is not None, "the peer is not to blame"


def test_a_peer_that_says_that_it_computes_is_waited_for():
    peer = PrefillEnd(at_once=False)
    fetch = client_of(peer.endpoint).fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    with pytest.raises(TimeoutError):
        fetch.result.result(1.5)  # more than a beat
    sent = peer.asked[0].finish()
    assert fetch.result.result(WAIT_S) == sent


def test_a_decode_server_that_waits_in_silence_is_not_lost(monkeypatch):
    monkeypatch.setattr(prefill_server, "HELD_S", 1.0)
    peer = PrefillEnd(at_once=False)
    fetch = client_of(peer.endpoint).fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    assert not peer.asked[0].cancelled.wait(1.5)
    sent = peer.asked[0].finish()
    assert fetch.result.result(WAIT_S) == sent


def test_no_more_prompts_are_computed_than_may_be(monkeypatch):
    monkeypatch.setattr(prefill_server, "MAX_ASKED", 1)
    peer = PrefillEnd(at_once=False)
    one, other = client_of(peer.endpoint), client_of(peer.endpoint)
    first = one.fetch(prompt(), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    assert other.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert other.counters["busy"] == 1
    peer.asked[0].finish()
    assert first.result.result(WAIT_S) is not None


def test_no_more_bytes_are_held_than_may_be(monkeypatch):
    monkeypatch.setattr(prefill_server, "MAX_HELD_BYTES", 15_000)
    peer = PrefillEnd(at_once=False)
    one, other = client_of(peer.endpoint), client_of(peer.endpoint)
    first = one.fetch(prompt(), WAIT_S)  # 10 pages
    assert peer.came.acquire(timeout=WAIT_S)
    assert peer.server.held_bytes == 10_000
    assert other.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert other.counters["busy"] == 1
    peer.asked[0].finish()
    assert first.result.result(WAIT_S) is not None
    wait_until(lambda: peer.server.held_bytes == 0)


def test_pages_that_wait_to_be_entered_count_as_those_that_come(monkeypatch):
    monkeypatch.setattr(page_client, "MAX_FETCHED_BYTES", 15_000)
    peer = PrefillEnd()
    client = client_of(peer.endpoint)
    waiting = client.fetch(prompt(), WAIT_S)  # 10 pages
    assert waiting.result.result(WAIT_S) is not None
    assert client.fetch(prompt(), WAIT_S) is None
    waiting.inserted()
    waiting.cancel()  # the request has ended, too
    unwanted = client.fetch(prompt(), WAIT_S)
    assert unwanted.result.result(WAIT_S) is not None
    assert client.fetch(prompt(), WAIT_S) is None
    unwanted.cancel()
    assert client.fetch(prompt(), WAIT_S).result.result(WAIT_S) is not None
    assert client.counters["full"] == 2


def test_strangers_and_garbage_do_not_disturb_a_prefill_server():
    peer = PrefillEnd()
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 4096, os.urandom(4096)):
        with socket.create_connection(peer.endpoint) as stranger:
            stranger.sendall(data)
    assert client_of(peer.endpoint).fetch(prompt(), WAIT_S).result.result(WAIT_S) is not None


class FaultyPeer:
    """A peer that knows the secret and does what a test says."""

    def __init__(self, behave) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behave = behave
        self.endpoint = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            link: Link[FromDecode] = Link(connection, admit(connection, SECRET, purpose=PURPOSE), FromDecode)
            assert isinstance(link.receive(), PrefillRequest)
            with contextlib.suppress(LinkLost):
                self._behave(link, connection)


def fetched_of(behave, within_s: float = WAIT_S) -> PageClient:
    client = client_of(FaultyPeer(behave).endpoint)
    fetch = client.fetch(prompt(), within_s)
    assert fetch.result.result(WAIT_S) is None
    wait_until(lambda: sum(client.counters[name] for name in ("lost", "late", "invalid")) == 1)
    return client


def sends(*messages):
    def behave(link, connection) -> None:
        for message in messages:
            if isinstance(message, bytes):
                link.send_bytes(memoryview(message))
            else:
                link.send(message)
        link.receive()

    return behave


@pytest.mark.parametrize(
    "messages",
    [
        (Computed([0], 11, 1000),),  # more pages than the prompt has
        (Computed([0], 10, 999),),
        (Computed([0, 0], 10, 1000),),
        (Computed([1], 10, 1000),),  # a hole
        (Computed([0], -1, 1000),),
        (Computed([0], 10, 1000), b"\0" * 999),
        (Computed([0], 10, 1000), b""),
        (Computed([0], 10, 1000), Computing()),
    ],
)
def test_pages_that_are_not_those_of_the_prompt_are_refused(messages):
    assert fetched_of(sends(*messages)).counters["invalid"] == 1


@pytest.mark.parametrize("messages", [(b"\0" * 1000,), (Computed([0], 10, 1000), b"\0" * 11_000)])
def test_bytes_that_are_not_due_end_the_connection(messages):
    assert fetched_of(sends(*messages)).counters["lost"] == 1


def test_a_peer_that_ends_between_two_pages_is_lost():
    def behave(link, connection) -> None:
        link.send(Computed([0], 10, 1000))
        link.send_bytes(memoryview(b"\0" * 5000))

    assert fetched_of(behave).counters["lost"] == 1


def test_a_peer_that_ends_within_a_page_is_lost():
    def behave(link, connection) -> None:
        link.send(Computed([0], 10, 1000))
        connection.sendall(b"\x00\x10\x00\x00" + bytes(100))

    assert fetched_of(behave).counters["lost"] == 1


def test_bytes_that_were_altered_on_their_way_are_not_used():
    def behave(link, connection) -> None:
        link.send(Computed([0], 10, 1000))
        connection.sendall(b"\x10\x00\x00\x00" + bytes(16 + 16))
        link.receive()

    assert fetched_of(behave).counters["lost"] == 1


def test_a_peer_that_trickles_has_no_more_time_than_others():
    def behave(link, connection) -> None:
        try:
            connection.sendall(b"\x00\x10\x00\x00")
            while True:
                connection.sendall(b"\0")
                time.sleep(0.02)
        except OSError:
            return

    assert fetched_of(behave, within_s=0.3).counters["late"] == 1


def test_an_address_where_nothing_listens_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = listener.getsockname()
    client = client_of(endpoint)
    assert client.fetch(prompt(), WAIT_S).result.result(WAIT_S) is None
    assert client.counters["lost"] == 1


def test_a_peer_that_accepts_and_says_nothing_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = client_of(listener.getsockname())
        assert client.fetch(prompt(), 0.3).result.result(WAIT_S) is None


def test_a_decode_server_that_ends_while_pages_are_sent_leaves_nothing_behind():
    form = PageForm(4, 10 * 2**20, (None,))
    peer = PrefillEnd(at_once=False, form=form)
    fetch = client_of(peer.endpoint, form=form).fetch(prompt(40), WAIT_S)
    assert peer.came.acquire(timeout=WAIT_S)
    peer.asked[0].finish()
    wait_until(lambda: peer.server.counters["sent_pages"] > 0)
    fetch.cancel()  # closes the connection, as the end of the process would
    wait_until(lambda: (peer.server.num_asked, peer.server.held_bytes) == (0, 0))
    wait_until(lambda: peer.server.counters["served_lost"] + peer.server.counters["served_sent"] == 1)


def test_more_prompts_than_a_decode_server_fetches_are_computed_there(monkeypatch):
    monkeypatch.setattr(page_client, "MAX_FETCHES", 1)
    peer = PrefillEnd(at_once=False)
    client = client_of(peer.endpoint)
    fetch = client.fetch(prompt(), WAIT_S)
    assert client.fetch(prompt(), WAIT_S) is None
    assert client.counters["full"] == 1
    fetch.cancel()
    fetch.result.result(WAIT_S)
