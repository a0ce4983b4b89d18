"""The choice of a peer: those that work, the least busy, by the beginning of the prompt."""

from quire.peers.peer_list import LONGEST_PAUSE_S, PeerList


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def peers(count: int) -> tuple[PeerList, Clock]:
    clock = Clock()
    return PeerList([("10.0.0.1", port) for port in range(1, count + 1)], clock), clock


def test_prompts_that_begin_alike_go_to_the_same_peer_and_others_to_all():
    found = set()
    for start in range(64):
        listed, _ = peers(4)
        ports = []
        for _ in range(3):
            peer = listed.choose("salt", [start, 2, 3])
            listed.worked(peer)
            ports.append(peer.port)
        assert len(set(ports)) == 1
        found |= set(ports)
    assert found == {1, 2, 3, 4}


def test_the_least_busy_peer_is_asked():
    listed, _ = peers(3)
    assert {listed.choose("", [1]).port for _ in range(3)} == {1, 2, 3}


def test_a_peer_that_failed_is_left_alone_for_longer_each_time():
    listed, clock = peers(1)
    pauses = []
    for _ in range(9):
        peer = listed.choose("", [1])
        assert peer is not None
        pauses.append(listed.failed(peer))
        clock.now += pauses[-1] / 2
        assert listed.choose("", [1]) is None
        clock.now += pauses[-1] / 2
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert max(pauses) == LONGEST_PAUSE_S


def test_one_prompt_finds_out_whether_a_peer_works_again():
    listed, clock = peers(1)
    listed.failed(listed.choose("", [1]))
    clock.now += 1
    peer = listed.choose("", [1])
    assert listed.choose("", [1]) is None
    listed.worked(peer)
    assert listed.choose("", [1]) is peer
    assert listed.failed(peer) == 1, "what was before counts no more"


def test_another_peer_is_asked_meanwhile():
    listed, _ = peers(2)
    failed = listed.choose("", [1])
    listed.failed(failed)
    for _ in range(3):
        assert listed.choose("", [1]) is not failed


def test_a_busy_peer_is_left_alone_for_a_moment():
    listed, clock = peers(1)
    listed.is_busy(listed.choose("", [1]))
    assert listed.choose("", [1]) is None
    clock.now += 0.5
    assert listed.choose("", [1]) is not None
