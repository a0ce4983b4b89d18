import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.page_pool import PagePool


def test_taking_gives_all_or_nothing():
    pool = PagePool(4)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.take(0) == []
    assert pool.take(1) is None


def test_a_page_is_free_again_when_its_last_holder_lets_go():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.hold(pages)
    pool.release(pages)
    assert pool.num_free == 0
    pool.release(pages)
    assert pool.num_free == 2


def test_a_free_page_can_be_neither_held_nor_released():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free and cannot be released"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free and cannot be held"):
        pool.hold([page])


def test_fewer_pages_than_none_cannot_be_taken():
    pool = PagePool(3)
    with pytest.raises(ValueError, match="-1 pages cannot be taken"):
        pool.take(-1)
    assert pool.take(0) == []
    assert pool.num_free == 2


def test_a_pool_of_the_reserved_page_alone_is_refused():
    with pytest.raises(ValueError, match="got 1"):
        PagePool(1)


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 6)), max_size=60))
def test_counts_agree_with_a_plain_multiset(operations):
    pool, held = PagePool(8), []
    for name, number in operations:
        if name == "take":
            pages = pool.take(number)
            assert (pages is None) == (number > 7 - len(set(held)))
            held += pages or []
        elif held:
            page = held[number % len(held)]
            getattr(pool, name)([page])
            held.append(page) if name == "hold" else held.remove(page)
        pool.check()
        assert pool.num_free == 7 - len(set(held))
        assert all(pool.holders(page) == held.count(page) for page in range(8))
