"""The account of the host's pages."""

from quire.core.host_tier import HostPage, HostTier, prefix_digests
from quire.core.page_pool import PagePool
from quire.core.prefix_cache import PrefixCache


def test_digests_name_prefixes_by_all_their_tokens_and_the_salt():
    one = prefix_digests("a", (1, 2, 3, 4, 5, 6), 2, 3, [])
    assert prefix_digests("a", (1, 2, 3, 4), 2, 2, []) == one[:2]
    assert prefix_digests("a", (1, 2, 3, 4, 5, 6), 2, 3, one[:1]) == one
    assert not set(prefix_digests("a", (9, 2, 3, 4, 5, 6), 2, 3, [])) & set(one)
    assert not set(prefix_digests("b", (1, 2, 3, 4, 5, 6), 2, 3, [])) & set(one)


def test_a_node_has_the_digest_of_its_prefix():
    cache = PrefixCache(PagePool(9), 2)
    pages = cache.take(3)
    cursor = cache.publish("a", (1, 2, 3, 4, 5, 6), [pages], 3)
    expected = prefix_digests("a", (1, 2, 3, 4, 5, 6), 2, 3, [])
    assert cursor.end.digest() == expected[2]
    assert cursor.end.parent.digest() == expected[1]


def test_a_page_that_is_held_is_not_overwritten():
    host = HostTier(3, 4)
    pages: list[HostPage] = []
    for name in (b"a", b"b"):
        page = host.reserve((name, 0))
        assert page is not None
        pages.append(page)
    assert host.reserve((b"c", 0)) is None, "both are being written"
    host.confirm(pages)
    host.hold(pages[:1])
    third = host.reserve((b"c", 0))
    assert third is not None
    assert third.page == pages[1].page
    assert host.find(b"b", 0) is None
    host.confirm([third])
    host.hold([third])
    assert host.reserve((b"d", 0)) is None
    host.clear()
    host.check()
    assert host.find(b"a", 0) is None
    assert host.reserve((b"d", 0)) is None, "what was forgotten is still being read"
    host.release([pages[0], third])
    host.check()
    assert host.is_balanced


def entered(host: HostTier, names: list[bytes]) -> list[HostPage]:
    pages = [host.reserve((name, 0)) for name in names]
    found = [page for page in pages if page is not None]
    assert len(found) == len(names)
    host.confirm(found)
    return found


def test_a_page_that_was_read_gives_way_after_one_that_was_not():
    host = HostTier(3, 4)
    first = entered(host, [b"a", b"b"])[:1]
    host.hold(first)
    host.release(first)
    entered(host, [b"c"])
    assert [host.find(name, 0) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_of_pages_that_were_read_together_the_last_gives_way_first():
    host = HostTier(3, 4)
    pages = entered(host, [b"a", b"b"])
    host.hold(pages)
    host.release(pages)
    entered(host, [b"c"])
    assert [host.find(name, 0) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_a_page_that_is_evicted_again_counts_as_used():
    host = HostTier(3, 4)
    cache = PrefixCache(PagePool(3), 2, host=host)
    for tokens in ((1, 2), (3, 4), (1, 2)):
        pages = cache.take(1)
        cache.publish("a", tokens, [pages], 1)
        cache.release(pages)
        cache.evict(1)
        host.confirm(host.take_saves()[1])
    entered(host, [b"c"])
    digests = [prefix_digests("a", tokens, 2, 1, [])[0] for tokens in ((1, 2), (3, 4))]
    assert [host.find(digest, 0) is not None for digest in digests] == [True, False]


def test_a_page_of_a_window_that_is_evicted_alone_is_saved():
    host = HostTier(9, 4)
    cache = PrefixCache(PagePool(9), 2, (None, 4), host)
    full, window = cache.take(2), cache.take(2)
    cache.publish("a", (1, 2, 3, 4), [full, window], 2)
    cache.release(window[:1])
    assert cache.evict(1) == 1
    copies, saved = host.take_saves()
    assert [copy.source.page for copy in copies] == window[:1]
    assert [one.key for one in saved] == [(prefix_digests("a", (1, 2), 2, 1, [])[0], 1)]


def test_a_node_keeps_the_digest_that_was_known():
    tokens = (1, 2, 3, 4, 5, 6)
    known = prefix_digests("a", tokens, 2, 2, [])
    cache = PrefixCache(PagePool(9), 2)
    cursor = cache.publish("a", tokens, [cache.take(3)], 3, digests=known)
    assert cursor.end.parent.known_digest is known[1]
    assert cursor.end.digest() == prefix_digests("a", tokens, 2, 3, [])[2]
