"""Messages between peers: what is sent arrives, and a bundle is taken only where it is what was asked for."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from quire.peers.bundle import PageForm, PageRange, problem
from quire.peers.messages import Computed, Computing, Free, FromDecode, FromPrefill, PrefillRequest, Refused

COUNTS = st.integers(0, 2**40)
TO_PREFILL = st.builds(
    PrefillRequest,
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
    st.binary(),
    st.none() | st.text(),
    st.text(),
    COUNTS,
    st.floats(0, 1e6),
    st.integers(-(2**31), 2**31),
) | st.just(Free())
TO_DECODE = (
    st.builds(Refused, st.text(), st.text())
    | st.just(Computing())
    | st.builds(Computed, st.lists(COUNTS, max_size=8), COUNTS, COUNTS)
)


@given(TO_PREFILL)
def test_what_a_decode_server_sends_arrives(message):
    assert msgspec.msgpack.Decoder(FromDecode).decode(msgspec.msgpack.encode(message)) == message


@given(TO_DECODE)
def test_what_a_prefill_server_sends_arrives(message):
    assert msgspec.msgpack.Decoder(FromPrefill).decode(msgspec.msgpack.encode(message)) == message


@given(
    st.lists(st.integers(-2, 12), max_size=4),
    st.integers(-2, 12),
    st.integers(0, 8),
    st.lists(st.none() | st.integers(2, 40), min_size=1, max_size=3),
    st.integers(1, 45),
)
def test_a_bundle_without_a_problem_has_a_bounded_number_of_pages_and_no_hole(firsts, end, first, windows, length):
    form = PageForm(4, 100, tuple(windows))
    if problem(form, PageRange(tuple(firsts), end), 100, first, length) is None:
        assert len(firsts) == len(windows)
        assert 0 <= PageRange(tuple(firsts), end).num_pages <= len(windows) * (length // 4 - first)
        assert end * 4 <= length
        assert all(begin == first for begin, window in zip(firsts, windows, strict=True) if window is None)
