"""Pages of prompts that are read for other engines and files, and those that come from there."""

from quire.request import Request
from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens

PROMPT = tuple(range(60, 82))  # 5 pages of 4 tokens, and 2 tokens


def harness(prefix_key=None, **changes) -> Harness:
    return Harness(limits(**({"host_pages": 40} | changes)), prefix_key=prefix_key)


def ran(one: Harness, number: int = 1, **fields) -> Request:
    asked = request(number, **({"prompt": PROMPT} | fields))
    one.add(asked)
    one.run()
    return asked


def names(one: Harness, digest: str = "", **fields) -> list[bytes]:
    return one.scheduler.exchange.names(request(99, **({"prompt": PROMPT} | fields)), digest)


def test_names_are_those_of_whole_pages_and_the_same_everywhere():
    one, other = harness(), harness(max_loras=2, num_pages=90)
    assert len(names(one)) == 5
    assert names(one) == names(other)
    assert names(one, prompt=PROMPT[:12]) == names(one)[:3]
    assert names(one, prompt=PROMPT[:3]) == []


def test_names_differ_by_salt_adapter_and_tokens():
    one = harness(max_loras=2)
    numbers = [one.load_adapter(name) for name in ("a", "b")]
    assert numbers == [1, 2]
    found = [
        names(one),
        names(one, salt="tenant"),
        names(one, "weights"),
        names(one, "other weights"),
        names(one, "1"),
        names(one, prompt=(0, *PROMPT[1:])),
    ]
    assert len({name for one in found for name in one}) == sum(map(len, found))
    assert names(one, "weights", adapter="a") == names(one, "weights", adapter="b"), "its number does not count"


def test_names_differ_where_positions_are_computed_otherwise():
    one = harness(prefix_key=lambda length: length > 20)
    longer, shorter = names(one), names(one, prompt=PROMPT[:16])
    assert not set(longer) & set(shorter)


def test_half_of_the_host_is_room_for_a_prompt():
    assert harness().scheduler.exchange.room == 20
    assert harness(host_pages=0).scheduler.exchange.room == 0


def test_cached_pages_are_counted_up_to_the_last_token():
    one = harness()
    asked = ran(one)
    exchange = one.scheduler.exchange
    assert exchange.num_cached(asked) == 5
    assert exchange.num_cached(request(9, prompt=PROMPT[:20])) == 4, "the last token is computed in any case"
    assert exchange.num_cached(request(9, prompt=PROMPT[:8] + PROMPT)) == 2
    assert exchange.num_cached(request(9, prompt=PROMPT, salt="tenant")) == 0


def brought(one: Harness, other: Harness, places: list[int], groups=(0,)) -> Request:
    """Pages of the prompt at these places come from `one` to `other`."""
    asked = ran(one)
    one.send(asked)
    other.elsewhere = {
        (name, group): page
        for (name, group), page in one.elsewhere.items()
        if names(one).index(name) in places and group in groups
    }
    other.bring(asked)
    return asked


def test_pages_that_came_count_as_far_as_they_are_together():
    other = harness()
    asked = brought(harness(), other, [0, 1, 3])
    assert other.scheduler.exchange.num_cached(asked) == 2
    assert other.scheduler.stats().host_pages == 3
    other.bring(asked)
    assert other.scheduler.stats().host_pages == 3, "they are here"


def test_pages_that_came_are_counted_after_those_of_the_device():
    other = harness()
    ran(other, prompt=PROMPT[:8])
    asked = brought(harness(), other, [2, 3])
    assert other.scheduler.exchange.num_cached(asked) == 4


def test_a_page_counts_where_every_group_has_it():
    groups = {"page_groups": (None, None), "num_pages": 60}
    other = harness(**groups)
    asked = brought(harness(**groups), other, [0, 1], groups=(0,))
    assert other.scheduler.exchange.num_cached(asked) == 0
    other = harness(**groups)
    asked = brought(harness(**groups), other, [0, 1], groups=(0, 1))
    assert other.scheduler.exchange.num_cached(asked) == 2


def test_an_engine_continues_from_pages_that_came():
    other = harness()
    asked = brought(harness(), other, [0, 1, 2, 3, 4])
    other.add(asked)
    other.run()
    assert other.tokens[1, 0] == expected_tokens(asked)
    assert other.cached[1, 0] == 20
    assert other.scheduler.stats().restored_pages == 5


def test_pages_that_were_given_up_on_the_way_are_neither_here_nor_held():
    one, other = harness(), harness()
    asked = ran(one)
    one.send(asked)
    other.elsewhere = one.elsewhere
    assert other.bring(asked, lambda: False) == 0
    assert other.scheduler.stats().host_pages == 0
    assert other.scheduler.exchange.num_cached(asked) == 0
    other.check_nothing_is_left()
    assert other.bring(asked) == 5


def test_pages_that_are_written_are_not_overwritten_and_are_not_held_afterwards():
    other = harness(host_pages=3)
    asked = brought(harness(), other, [0, 1, 2, 3, 4])
    other.check_nothing_is_left()
    reserved = other.scheduler.exchange.reserve(asked, [(0, 0), (1, 0), (2, 0), (3, 0)])
    assert other.scheduler.stats().host_pages == 3
    other.scheduler.exchange.abandon([page for _, page in reserved])
    other.check_nothing_is_left()


def test_rows_get_pages_by_their_place_among_them():
    one = harness()
    asked = request(1, prompt=PROMPT)
    reserved = one.scheduler.exchange.reserve(asked, [(3, 0), (1, 0)])
    expected = names(one)
    assert [(at, page.key) for at, page in reserved] == [(0, (expected[3], 0)), (1, (expected[1], 0))]
    again = one.scheduler.exchange.reserve(asked, [(1, 0), (0, 0)])
    assert [at for at, _ in again] == [1], "the first is being written"
    assert one.scheduler.exchange.reserve(asked, []) == []


def test_a_lack_of_room_is_told_from_pages_that_are_there():
    one = harness(host_pages=3)
    asked, exchange = request(1, prompt=PROMPT), one.scheduler.exchange
    reserved = exchange.reserve(asked, [(0, 0), (1, 0), (2, 0)])
    assert exchange.reserve(asked, [(1, 0), (2, 0)]) == [], "they are being written"
    assert exchange.reserve(asked, [(3, 0), (4, 0)]) is None
    assert exchange.reserve(asked, [(2, 0), (3, 0)]) is None, "one is there, and none gets a page"
    exchange.confirm([page for _, page in reserved])
    assert [at for at, _ in exchange.reserve(asked, [(2, 0), (3, 0), (4, 0)])] == [1, 2]


def test_without_a_host_nothing_is_reserved():
    one = harness(host_pages=0)
    assert one.scheduler.exchange.reserve(request(1, prompt=PROMPT), [(0, 0)]) == []
    asked = ran(one)
    assert one.scheduler.exchange.num_cached(asked) == 5


def test_pages_are_found_from_the_first_that_is_asked_for():
    one = harness()
    asked = ran(one)
    exchange = one.scheduler.exchange
    assert exchange.find(asked, 0) == ((0,), 5)
    assert exchange.find(asked, 3) == ((3,), 5)
    assert exchange.find(asked, 7) == ((7,), 7), "none"
    assert exchange.find(request(9, prompt=PROMPT[:8] + PROMPT), 0) == ((0,), 2)


def test_of_a_window_the_last_pages_are_found():
    one = harness(page_groups=(None, 6), num_pages=60)
    asked = ran(one)
    exchange = one.scheduler.exchange
    firsts, end = exchange.find(asked, 0)
    assert (firsts, end) == ((0, 3), 5)
    assert exchange.find(asked, 4) == ((4, 4), 5)
    pages = exchange.pages(asked, [(4, 1), (3, 1), (0, 0)], 5)
    assert pages is not None
    assert all(pages)
    assert len(set(pages)) == 3


def test_pages_of_a_part_of_the_prompt_are_those_that_going_on_there_reads():
    one = harness()
    asked = ran(one)
    exchange = one.scheduler.exchange
    whole = exchange.pages(asked, [(n, 0) for n in range(5)], 5)
    assert whole is not None
    assert exchange.pages(asked, [(2, 0), (1, 0)], 3) == [whole[2], whole[1]]


def test_pages_that_were_evicted_are_not_there():
    one = harness()
    asked = ran(one)
    exchange = one.scheduler.exchange
    assert exchange.pages(asked, [(0, 0)], 5) is not None
    one.scheduler._running.cache.evict(2)  # that of the answer, and the last one of the prompt
    assert exchange.pages(asked, [(0, 0)], 5) is None, "the last page is gone, and with it those that end there"
    assert exchange.pages(asked, [(0, 0)], 4) is not None


def test_an_engine_with_several_groups_continues_from_pages_that_came():
    groups = {"page_groups": (None, 6, None), "num_pages": 90}
    other = harness(**groups)
    asked = brought(harness(**groups), other, [0, 1, 2, 3, 4], groups=(0, 1, 2))
    other.add(asked)
    other.run()  # the executor compares every position that a group reads
    assert other.tokens[1, 0] == expected_tokens(asked)
    assert other.cached[1, 0] == 20


def test_pages_are_found_under_their_salt_and_their_adapter_alone():
    one = harness(max_loras=2, num_pages=60)
    for name in ("a", "b"):
        one.load_adapter(name)
    asked = ran(one, salt="tenant", adapter="a")
    exchange = one.scheduler.exchange
    assert exchange.find(asked, 0) == ((0,), 5)
    for other in ({}, {"salt": "tenant"}, {"adapter": "a"}, {"salt": "tenant", "adapter": "b"}):
        assert exchange.find(request(9, prompt=PROMPT, **other), 0) == ((0,), 0)


def test_pages_come_under_their_salt_and_their_adapter_alone():
    one = harness(max_loras=2)
    for name in ("a", "b"):
        one.load_adapter(name)
    exchange = one.scheduler.exchange
    reserved = exchange.reserve(request(1, prompt=PROMPT, salt="tenant", adapter="a"), [(0, 0), (1, 0)])
    exchange.confirm([page for _, page in reserved])
    assert exchange.num_cached(request(1, prompt=PROMPT, salt="tenant", adapter="a")) == 2
    for other in ({}, {"salt": "tenant"}, {"adapter": "a"}, {"salt": "tenant", "adapter": "b"}):
        assert exchange.num_cached(request(9, prompt=PROMPT, **other)) == 0
