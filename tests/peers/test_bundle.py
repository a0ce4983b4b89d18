"""The longest range of pages that going on could read."""

from hypothesis import given
from hypothesis import strategies as st

from quire.peers.bundle import PageForm, PageRange, longest_range
from quire.reach import ChunkReach
from tests.fake_executor import is_read

FORMS = [PageForm(4, 100, windows) for windows in ((None,), (9,), (None, 5), (2, None, 17), (None, ChunkReach(10)))]


def is_readable(form: PageForm, first: int, end: int, pages: set[tuple[int, int]]) -> bool:
    """Every group has, from `first` on, the positions that a sequence reads which goes on at page `end`."""
    for group, reach in enumerate(form.groups):
        position = end * form.page_size
        needed = {place // form.page_size for place in range(position) if is_read(reach, place, position)}
        if any(place >= first and (place, group) not in pages for place in needed):
            return False
    return True


@given(
    form=st.sampled_from(FORMS),
    first=st.integers(0, 4),
    more=st.integers(0, 8),
    pages=st.sets(st.tuples(st.integers(0, 12), st.integers(0, 2))),
    are_missing=st.booleans(),
)
def test_the_longest_range_ends_where_every_group_has_what_going_on_reads(form, first, more, pages, are_missing):
    if are_missing:  # few
        pages = {(place, group) for place in range(13) for group in range(3)} - set(sorted(pages)[:3])
    found = longest_range(form, first, first + more, lambda place, group: (place, group) in pages)
    ends = [end for end in range(first, first + more + 1) if is_readable(form, first, end, pages)]
    assert found.end == max(ends, default=first)
    assert set(found.rows()) <= pages
    assert all(first <= begin <= found.end for begin in found.firsts)


def test_nothing_is_in_an_empty_range():
    assert longest_range(FORMS[2], 3, 3, lambda place, group: True) == PageRange((3, 3), 3)
