"""Engines that keep pages in a folder: the next one continues from them, and the tokens are those of computing."""

import logging
import threading
import time

import pytest

from quire.engine.pages.folder_source import TRY_AGAIN_S, ReadTimes
from quire.ipc.messages import Abort, Submit
from quire.page_folder.page_folder import SUBFOLDER, PageFolder
from tests.core.harness import request as new_request
from tests.engine.test_driver import wait_until
from tests.fake_executor import expected_tokens
from tests.patience import WAIT_S
from tests.peers.engines import KEY, PAGE_SIZE, PeerEngine, folder_of

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


def count(engine: PeerEngine, name: str) -> int:
    return engine.engine.page_sources.counters()[f"folder_{name}"]


def check(engine: PeerEngine, prompt=LONG, which: int = 0, **fields) -> None:
    """The request gets the tokens of computing them. `which`: the number of its adapter."""
    asked = engine.submit(prompt, **fields)
    engine.front_end.wait_for(asked)
    assert engine.front_end.tokens[asked.request_id] == expected_tokens(asked, adapter=which)


def written(engine: PeerEngine, prompt=LONG, **fields) -> None:
    """The request is answered and its pages are in files."""
    before = count(engine, "saves_written")
    check(engine, prompt, **fields)
    wait_until(lambda: count(engine, "saves_written") > before)


@pytest.mark.parametrize("groups", [(None,), (None, 9), (9,), (5, None, 17)])
def test_the_next_engine_continues_from_the_pages_of_the_last(engines, tmp_path, groups):
    first = engines(folder=folder_of(tmp_path), page_groups=groups)
    written(first, max_tokens=9)
    assert first.computed_tokens == len(LONG)
    second = engines(folder=folder_of(tmp_path), page_groups=groups)
    check(second, max_tokens=9)
    assert second.computed_tokens <= len(LONG) - 10 * PAGE_SIZE + 1
    assert count(second, "reads_found") == 1
    assert count(second, "read_pages") == count(first, "written_pages") > 0
    check(second, (*LONG, 7, 8, 9))
    assert count(second, "reads_found") == 1, "they are here now"


def test_a_prompt_that_goes_on_is_kept_from_where_it_was(engines, tmp_path):
    first = engines(folder=folder_of(tmp_path))
    written(first)
    longer = LONG + tuple(range(20))
    written(first, longer)
    assert count(first, "written_pages") == len(longer) // PAGE_SIZE
    check(first, LONG)
    assert count(first, "saves_written") == 2, "nothing was new"
    second = engines(folder=folder_of(tmp_path))
    check(second, longer)
    assert count(second, "read_pages") == len(longer) // PAGE_SIZE


def test_salts_share_no_pages_and_do_not_show(engines, tmp_path):
    first = engines(folder=folder_of(tmp_path))
    for salt in ("key-of-a-tenant", "other", "\ud800"):
        written(first, salt=salt)
    assert count(first, "written_pages") == 30
    files = list((tmp_path / SUBFOLDER).rglob("*.page"))
    assert len(files) == 30
    assert not any(b"tenant" in str(file).encode() + file.read_bytes() for file in files)
    second = engines(folder=folder_of(tmp_path))
    check(second, salt="a third")
    assert count(second, "read_pages") == 0
    check(second, salt="other")
    assert count(second, "read_pages") == 10


def test_pages_of_an_adapter_are_found_by_its_weights_whatever_its_name(engines, tmp_path):
    def adapted(**adapters) -> PeerEngine:
        made = engines(folder=folder_of(tmp_path), adapters=adapters)
        for name in adapters:
            wait_until(lambda name=name: made.engine.adapters.digest_of(name) is not None)
        return made

    written(adapted(tuned="1"), adapter="tuned", which=1)
    other = adapted(tuned="2")
    check(other, adapter="tuned", which=2)
    check(other)
    assert count(other, "read_pages") == 0
    same = adapted(renamed="1")
    check(same, adapter="renamed", which=1)
    assert count(same, "read_pages") == 10


def test_pages_of_an_adapter_that_another_engine_had_are_not_kept(engines, tmp_path, caplog):
    """Its name stands for other weights here, and it leaves with the requests that began with it."""
    made = engines(folder=folder_of(tmp_path), adapters={"tuned": "2"})
    port = made.front_end.port
    asked = new_request(port.request_id(100), prompt=LONG, adapter="tuned", adapter_digest=repr(1))
    port.send(Submit(asked, so_far=[[]], adapter_folder="1"))
    made.front_end.wait_for(asked)
    check(made, LONG[::-1], adapter="tuned", which=2)  # of which pages are kept, so that those before are settled
    wait_until(lambda: count(made, "saves_written") == 1)
    assert count(made, "written_pages") == len(LONG) // PAGE_SIZE
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_other_weights_find_nothing(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    other = engines(folder=folder_of(tmp_path, key=KEY[::-1]))
    check(other)
    assert other.computed_tokens == len(LONG)
    assert count(other, "reads_found") == 0


@pytest.mark.parametrize("groups", [(None,), (None, 9)])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_damaged_page_and_those_after_it_are_computed(engines, tmp_path, place, groups):
    first = engines(folder=folder_of(tmp_path), page_groups=groups)
    written(first)
    asked = first.submit(LONG)
    first.front_end.wait_for(asked)
    names = first.engine.scheduler.exchange.names(asked, "")
    (file,) = (tmp_path / SUBFOLDER / KEY).glob(f"{names[place].hex()}-0.page")
    contents = bytearray(file.read_bytes())
    contents[-50] ^= 4
    file.write_bytes(contents)
    second = engines(folder=folder_of(tmp_path), page_groups=groups)
    check(second)
    assert count(second, "removed_corrupt") == 1
    if groups == (None,):
        assert second.computed_tokens == len(LONG) - place * PAGE_SIZE
    wait_until(lambda: count(second, "saves_written") == 1)
    third = engines(folder=folder_of(tmp_path), page_groups=groups)
    check(third)
    assert third.computed_tokens <= len(LONG) - 10 * PAGE_SIZE + 1, "the page was written again"


def test_files_that_are_deleted_meanwhile_are_computed(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    second = engines(folder=folder_of(tmp_path))
    for file in (tmp_path / SUBFOLDER).rglob("*.page"):
        file.unlink()
    check(second)
    assert second.computed_tokens == len(LONG)
    assert count(second, "reads_damaged") == 1


def test_a_folder_that_cannot_be_written_harms_no_request(engines, tmp_path):
    first = engines(folder=folder_of(tmp_path))
    (tmp_path / SUBFOLDER / KEY).write_text("in the way")
    check(first)
    wait_until(lambda: count(first, "saves_failed") == 1)
    check(first, LONG[::-1])
    wait_until(lambda: count(first, "saves_skipped") == 1)
    assert count(first, "write_errors") == 1, "it is not tried again at once"


def test_requests_that_begin_alike_read_the_pages_once(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    release = threading.Event()

    class Slow(PageFolder):
        def read(self, page):
            release.wait(WAIT_S)
            return super().read(page)

    second = engines(folder=folder_of(tmp_path, kind=Slow))
    asked = [second.submit((*LONG, *[number] * 4)) for number in range(5)]
    wait_until(lambda: count(second, "reads_waited") == 4)
    release.set()
    second.front_end.wait_for(*asked)
    for one in asked:
        assert second.front_end.tokens[one.request_id] == expected_tokens(one)
    assert count(second, "read_pages") == 10


def test_when_the_one_that_reads_goes_away_the_next_one_reads(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    release = threading.Event()

    class Slow(PageFolder):
        def read(self, page):
            release.wait(WAIT_S)
            return super().read(page)

    second = engines(folder=folder_of(tmp_path, kind=Slow))
    gone, stays = second.submit(LONG), second.submit(LONG)
    wait_until(lambda: count(second, "reads_waited") == 1)
    second.front_end.port.send(Abort(gone.request_id))
    release.set()
    second.front_end.wait_for(stays)
    assert second.front_end.tokens[stays.request_id] == expected_tokens(stays)
    assert second.computed_tokens < len(LONG)


def test_a_disk_that_stands_still_is_not_waited_for(engines, tmp_path):
    first, other = engines(folder=folder_of(tmp_path)), LONG[::-1]
    written(first)
    written(first, other)
    entered, release = threading.Event(), threading.Event()

    class Stuck(PageFolder):
        def read(self, page):
            entered.set()
            release.wait(WAIT_S)
            return super().read(page)

    second = engines(folder=folder_of(tmp_path, kind=Stuck))
    asked = second.submit(LONG)
    assert entered.wait(WAIT_S)
    second.source._current.expire()  # as its timer does after some seconds
    second.front_end.wait_for(asked)
    assert second.front_end.tokens[asked.request_id] == expected_tokens(asked)
    check(second, other)
    assert second.computed_tokens == 2 * len(LONG)
    assert count(second, "reads_stuck") == 1, "the second one did not wait at all"
    release.set()
    wait_until(lambda: count(second, "reads_late") == 1)


def test_a_late_read_tells_how_slow_the_disk_is_but_not_one_that_never_began(engines, tmp_path):
    first, other = engines(folder=folder_of(tmp_path)), LONG[::-1]
    written(first)
    written(first, other)
    entered, release = threading.Event(), threading.Event()
    noted: list[int] = []

    class Stuck(PageFolder):
        def read(self, page):
            entered.set()
            release.wait(WAIT_S)
            return super().read(page)

    class Noted(ReadTimes):
        def measure(self, num_pages, took_s):
            noted.append(num_pages)
            assert took_s > 0

    second = engines(folder=folder_of(tmp_path, kind=Stuck))
    second.source.read_times = Noted(time.monotonic)
    asked = [second.submit(LONG), second.submit(other)]
    assert entered.wait(WAIT_S)
    wait_until(lambda: len(second.source._under_way) == 2)
    for read in list(second.source._under_way.values()):
        read.expire()  # as their timers do after some seconds
    second.front_end.wait_for(*asked)
    release.set()
    wait_until(lambda: count(second, "reads_late") == 2)
    assert noted == [10]


def test_a_source_that_fails_harms_no_request(engines, tmp_path, caplog):
    written(engines(folder=folder_of(tmp_path)))

    class Broken(PageFolder):
        def has(self, page):
            raise RuntimeError("can't start new thread")

    prefill = engines(answers=True)
    second = engines(prefill.endpoint, folder=folder_of(tmp_path, kind=Broken))
    check(second)
    assert second.client.counters["received"] == 1, "the next source is asked"
    assert caplog.text.count("the pages of a prompt cannot be fetched") == 1


def test_no_prompt_waits_for_a_read_that_could_not_begin(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    second = engines(folder=folder_of(tmp_path))
    second.source.close()  # there are no threads to read with
    check(second)
    check(second, (*LONG, 7))
    assert second.computed_tokens >= len(LONG)
    assert not second.source._under_way
    assert second.source._read_bytes == 0
    assert count(second, "reads_waited") == 0


def test_of_a_prompt_larger_than_the_folder_the_beginning_is_kept(engines, tmp_path):
    size = folder_of(tmp_path)._files.num_bytes((bytes(16), 0))
    first = engines(folder=folder_of(tmp_path, max_bytes=6 * size))
    check(first)
    wait_until(lambda: count(first, "saves_evicted") + count(first, "saves_written") == 1)
    assert count(first, "saves_evicted") == 1
    assert count(first, "removed_evicted") == 0
    second = engines(folder=folder_of(tmp_path, max_bytes=6 * size))
    check(second)
    assert count(second, "read_pages") == 6


def test_a_save_that_is_counted_has_its_pages_counted(engines, tmp_path):
    class Meanwhile(PageFolder):
        ended = staticmethod(lambda: None)

        def counted(self):
            before = super().counted()
            self.ended()
            return before

    folder = folder_of(tmp_path, kind=Meanwhile)
    engine = engines(folder=folder)
    folder.ended = lambda: written_once(engine)

    def written_once(engine):
        folder.ended = lambda: None
        written(engine)

    counted = engine.engine.page_sources.counters()
    assert counted["folder_written_pages"] == counted["folder_saves_written"] == 0


def test_a_small_folder_keeps_what_was_used_last(engines, tmp_path):
    size = folder_of(tmp_path)._files.num_bytes((bytes(16), 0))
    first = engines(folder=folder_of(tmp_path, max_bytes=12 * size))
    for start in (100, 200, 300):
        written(first, range(start, start + 42))
    assert count(first, "bytes") <= 12 * size
    second = engines(folder=folder_of(tmp_path, max_bytes=12 * size))
    check(second, range(300, 342))
    assert count(second, "read_pages") == 10


def test_a_prompt_longer_than_the_host_has_room_for_is_read_in_part(engines, tmp_path):
    written(engines(folder=folder_of(tmp_path)))
    second = engines(folder=folder_of(tmp_path), host_pages=12)
    check(second)
    assert count(second, "read_pages") == 6, "half of the pages of the host"


def test_pages_of_files_come_before_those_of_peers(engines, tmp_path):
    prefill = engines(answers=True)
    written(engines(folder=folder_of(tmp_path)), LONG)
    both = engines(prefill.endpoint, folder=folder_of(tmp_path))
    check(both)
    assert prefill.computed_tokens == 0
    longer = LONG + tuple(range(40))
    check(both, longer)
    assert both.client.counters["received"] == 1
    assert count(both, "reads_found") == 1


def test_two_engines_share_a_folder(engines, tmp_path):
    pair = [engines(folder=folder_of(tmp_path)) for _ in range(2)]
    asked = [(one, one.submit(range(start, start + 42))) for start in range(100, 300, 20) for one in pair]
    for one, request in asked:
        one.front_end.wait_for(request)
        assert one.front_end.tokens[request.request_id] == expected_tokens(request)
    for one in pair:
        wait_until(lambda one=one: not one.engine.scheduler.num_requests)
        one.engine.scheduler.check()
        assert count(one, "write_errors") == count(one, "removed_corrupt") == 0


def test_a_disk_that_was_slow_is_tried_again():
    now = [0.0]
    times = ReadTimes(lambda: now[0])
    assert times.page_s is None
    times.measure(num_pages=10, took_s=1.0)
    times.measure(num_pages=10, took_s=2.0)
    assert times.page_s == pytest.approx(0.125)
    now[0] = TRY_AGAIN_S + 1
    assert times.page_s is None


@pytest.mark.parametrize(
    ("computing_s", "is_read"),
    [(None, True), (0.0, False), (1e9, True)],
    ids=["not known", "sooner than reading", "later than reading"],
)
def test_pages_are_read_where_that_is_sooner_than_computing(engines, tmp_path, computing_s, is_read):
    first = engines(folder=folder_of(tmp_path))
    written(first)
    asked = []

    def compute_s(num_tokens, num_cached):
        asked.append((num_tokens, num_cached))
        return computing_s

    second = engines(folder=folder_of(tmp_path), compute_s=compute_s)
    second.source.read_times.measure(num_pages=1, took_s=0.001)
    check(second)
    assert count(second, "reads_found" if is_read else "reads_slower") == 1
    assert asked == [(40, 0)], "ten pages of four tokens, of which none is cached"
