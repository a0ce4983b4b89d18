"""Pages in real files: the next server finds them, and whatever is wrong with a file is the lack of a page."""

import errno
import logging
import os
import resource
import signal
import threading

import pytest

from quire.page_folder.page_file import ArrayForm, PageFiles
from quire.page_folder.page_folder import PARTS, SUBFOLDER, PageFolder

KEY = "0123456789abcdef" * 2
FILES = PageFiles(KEY, 4, 64, (ArrayForm(("keys",), "float32", (1, 4, 4)),))
OTHERS = PageFiles(KEY[::-1], 4, 64, (ArrayForm(("keys",), "float32", (1, 4, 4)),))


def name(number: int, group: int = 0) -> tuple[bytes, int]:
    return bytes([number]) * 16, group


def data(number: int) -> memoryview:
    return memoryview(bytes([number]) * 64)


SIZE = FILES.num_bytes(name(1))


class Clock:
    """Nanoseconds; every look is a second later."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        self.now_ns += 10**9
        return self.now_ns


def opened(root, max_bytes: int = 2**20, files: PageFiles = FILES, clock=None) -> PageFolder:
    folder = PageFolder(root, files, max_bytes, clock or Clock())
    folder.scan()
    return folder


def file_of(root, number: int):
    (found,) = (root / SUBFOLDER / KEY).glob(f"{number:02x}*.page")
    return found


def test_the_next_server_finds_what_was_written(tmp_path):
    first = opened(tmp_path)
    for number in range(5):
        assert first.write(name(number, number % 2), data(number))
    second = opened(tmp_path)
    assert second.num_pages == first.num_pages == 5
    assert second.num_bytes == first.num_bytes == sum(one.stat().st_size for one in tmp_path.rglob("*.page"))
    for number in range(5):
        assert second.has(name(number, number % 2))
        assert second.read(name(number, number % 2)) == data(number)
        assert not second.has(name(number, 1 - number % 2))
    assert second.counted()["read_bytes"] == 5 * 64
    assert not list((tmp_path / SUBFOLDER / PARTS).iterdir())


def test_files_can_be_read_by_their_owner_alone(tmp_path):
    folder = opened(tmp_path)
    folder.write(name(1), data(1))
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    for made in (tmp_path / SUBFOLDER, tmp_path / SUBFOLDER / KEY, tmp_path / SUBFOLDER / PARTS):
        assert made.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_a_warning(tmp_path, caplog):
    opened(tmp_path)
    assert not caplog.messages
    (tmp_path / SUBFOLDER).chmod(0o777)
    folder = opened(tmp_path)
    folder.scan()
    assert len(caplog.messages) == 1
    assert "other users can write" in caplog.text


def test_a_page_of_other_weights_is_not_found(tmp_path):
    opened(tmp_path, files=OTHERS).write(name(1), data(1))
    folder = opened(tmp_path)
    assert not folder.has(name(1))
    assert folder.num_pages == 0
    assert folder.num_bytes == SIZE, "it counts to the limit"


def test_a_damaged_file_is_removed_with_one_warning(tmp_path, caplog):
    folder = opened(tmp_path)
    for number in (1, 2, 3):
        folder.write(name(number), data(number))
        file = file_of(tmp_path, number)
        contents = bytearray(file.read_bytes())
        contents[-40] ^= 1
        file.write_bytes(contents[: len(contents) - (number == 2) * 10])
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            assert folder.read(name(number)) is None
            assert not folder.has(name(number))
    assert [line for line in caplog.messages if "checksum" in line] == caplog.messages
    assert len(caplog.messages) == 1
    assert not list(tmp_path.rglob("*.page"))
    assert folder.counted()["removed_corrupt"] == 3
    assert folder.num_bytes == 0


def test_every_flipped_byte_of_a_file_and_every_length_is_noticed(tmp_path):
    folder = opened(tmp_path)
    folder.write(name(1), data(1))
    file = file_of(tmp_path, 1)
    good = file.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(len(good))]
    damaged += [good[:length] for length in range(len(good))] + [good + b"\0"]
    for contents in damaged:
        file.write_bytes(contents)
        assert folder.read(name(1)) is None
        assert not file.exists()
    assert folder.counted()["removed_corrupt"] == len(damaged)
    file.write_bytes(good)
    assert folder.read(name(1)) == data(1)


def test_a_file_of_other_weights_under_our_name_is_removed(tmp_path, caplog):
    opened(tmp_path, files=OTHERS).write(name(1), data(1))
    (tmp_path / SUBFOLDER / OTHERS.key).rename(tmp_path / SUBFOLDER / KEY)
    folder = opened(tmp_path)
    assert folder.has(name(1))
    assert folder.read(name(1)) is None
    assert "other weights" in caplog.text
    assert not folder.has(name(1))
    assert not list(tmp_path.rglob("*.page"))


def test_what_is_no_plain_file_is_not_read(tmp_path):
    folder = opened(tmp_path)
    for number in (1, 2, 3):
        folder.write(name(number), data(number))
    for number, make in ((1, os.mkfifo), (2, os.mkdir), (3, lambda path: os.symlink("/dev/zero", path))):
        path = file_of(tmp_path, number)
        path.unlink()
        make(path)
        assert folder.read(name(number)) is None
        assert not folder.has(name(number))


def test_files_of_others_are_left_alone(tmp_path):
    precious = [tmp_path / "notes.txt", tmp_path / SUBFOLDER / "notes.txt", tmp_path / SUBFOLDER / KEY / "notes.page"]
    for path in precious:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    folder = opened(tmp_path, max_bytes=SIZE)
    for number in range(3):
        folder.write(name(number), data(number))
    assert [path.read_text() for path in precious] == ["mine"] * 3


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    clock = Clock()
    folder = opened(tmp_path, max_bytes=3 * SIZE, clock=clock)
    for number in (1, 2, 3):
        folder.write(name(number), data(number))
    clock.now_ns += 100 * 10**9
    folder.touch([(name(1), 0)])
    folder.write(name(4), data(4))
    assert [folder.has(name(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]
    again = opened(tmp_path, max_bytes=3 * SIZE, clock=clock)  # the times are those of the files
    again.write(name(5), data(5))
    assert [again.has(name(number)) for number in (1, 3, 4, 5)] == [True, False, True, True]
    assert again.num_bytes == 3 * SIZE
    assert folder.counted()["removed_evicted"] == 1


def test_of_one_prompt_the_last_pages_go_first(tmp_path):
    clock = Clock()
    folder = opened(tmp_path, max_bytes=4 * SIZE, clock=clock)
    for place in range(4):
        folder.write(name(place), data(place), place)
    clock.now_ns += 100 * 10**9
    folder.touch([(name(place), place) for place in range(4)])
    folder = opened(tmp_path, max_bytes=4 * SIZE, clock=clock)
    for number in (10, 11):
        folder.write(name(number), data(number))
    assert [folder.has(name(place)) for place in range(4)] == [True, True, False, False]


def kept(folder: PageFolder, count: int) -> list[int]:
    return [number for number in range(count) if folder.has(name(number))]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_of_a_prompt_that_was_just_saved_the_last_pages_go_first(tmp_path, is_restarted):
    clock = Clock()
    folder = opened(tmp_path, max_bytes=4 * SIZE, clock=clock)
    saved_ns = clock()
    for place in range(4):
        folder.write(name(place), data(place), place, saved_ns)
    if is_restarted:
        folder = opened(tmp_path, max_bytes=4 * SIZE, clock=clock)
    for number in (10, 11):
        folder.write(name(number), data(number))
    assert kept(folder, 12) == [0, 1, 10, 11]


def test_of_a_prompt_larger_than_the_folder_the_first_pages_are_kept(tmp_path):
    clock = Clock()
    folder = opened(tmp_path, max_bytes=4 * SIZE, clock=clock)
    folder.write(name(20), data(20))
    saved_ns = clock()
    for place in range(10):
        assert folder.write(name(place), data(place), place, saved_ns)
    assert kept(folder, 21) == [0, 1, 2, 3]
    assert folder.counted()["removed_evicted"] == 1, "only the other prompt's"
    assert folder.counted()["written_pages"] == 5


def test_a_file_from_the_future_does_not_stay_for_ever(tmp_path):
    clock = Clock()
    folder = opened(tmp_path, max_bytes=2 * SIZE, clock=clock)
    for number in (1, 2):
        folder.write(name(number), data(number))
        os.utime(file_of(tmp_path, number), ns=(2 * 10**18, 2 * 10**18))
    folder.scan()
    folder.write(name(3), data(3))
    assert folder.has(name(3))


def test_a_file_from_the_future_ages_from_the_scan_that_finds_it(tmp_path):
    """Else each scan would make it the one that was used last, and newer pages would go in its place."""
    clock = Clock()
    folder = opened(tmp_path, max_bytes=3 * SIZE, clock=clock)
    folder.write(name(1), data(1))
    os.utime(file_of(tmp_path, 1), ns=(2 * 10**18, 2 * 10**18))
    for number in (2, 3, 4):
        folder.scan()
        clock.now_ns += 10**9
        folder.write(name(number), data(number))
        clock.now_ns += 10**9
    assert kept(folder, 5) == [2, 3, 4]


def test_pages_are_kept_after_a_clock_was_set_back(tmp_path):
    """Before a scan, which comes after minutes: pages of the time before count as used long ago."""
    clock = Clock()
    folder = opened(tmp_path, max_bytes=2 * SIZE, clock=clock)
    for number in (1, 2):
        assert folder.write(name(number), data(number))
    clock.now_ns -= 10**17
    assert folder.write(name(3), data(3)), "no room is made"
    folder.touch([(name(2), 0)])
    clock.now_ns += 10**9
    assert folder.write(name(4), data(4))
    assert folder.has(name(4))
    assert not folder.has(name(1))


def test_a_key_that_cannot_be_listed_does_not_hide_the_others(tmp_path, caplog):
    class Broken(PageFolder):
        def _list_key(self, key):
            if key == OTHERS.key:
                raise OSError(errno.EIO, "Input/output error")
            return super()._list_key(key)

    opened(tmp_path).write(name(1), data(1))
    opened(tmp_path, files=OTHERS).write(name(2), data(2))
    folder = Broken(tmp_path, FILES, 2**20)
    folder.scan()
    assert folder.has(name(1))
    assert folder.num_pages == 1
    assert f"{OTHERS.key} cannot be listed: Input/output error" in caplog.text


def test_what_changes_during_a_scan_is_known_after_it(tmp_path):
    class Busy(PageFolder):
        def _list_key(self, key):
            listed = list(super()._list_key(key))
            self.write(name(2), data(2))
            self._remove(self._path(name(1)), "evicted")
            return iter(listed)

    folder = Busy(tmp_path, FILES, 2**20, Clock())
    for number in (0, 1):
        folder.write(name(number), data(number))
    folder.scan()
    assert kept(folder, 3) == [0, 2]
    assert folder.num_pages == 2
    assert folder.num_bytes == 2 * SIZE
    file_of(tmp_path, 0).unlink()
    PageFolder.write(folder, name(1), data(1))
    folder.scan()
    assert kept(folder, 3) == [2], "what another server removed is forgotten"


def test_pages_of_other_models_give_way_too(tmp_path):
    clock = Clock()
    opened(tmp_path, files=OTHERS, clock=clock).write(name(1), data(1))
    folder = opened(tmp_path, max_bytes=2 * SIZE, clock=clock)
    folder.write(name(2), data(2))
    folder.write(name(3), data(3))
    assert folder.has(name(2))
    assert folder.has(name(3))
    assert not list((tmp_path / SUBFOLDER / OTHERS.key).iterdir())


def test_a_file_that_another_server_removed_is_the_lack_of_a_page(tmp_path, caplog):
    folder, other = opened(tmp_path), opened(tmp_path, max_bytes=SIZE)
    folder.write(name(1), data(1))
    other.scan()
    other.write(name(2), data(2))
    assert folder.has(name(1))
    assert folder.read(name(1)) is None
    assert not folder.has(name(1))
    assert not caplog.messages
    folder.scan()
    assert folder.read(name(2)) == data(2), "and what it wrote is found"


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path):
    folder = opened(tmp_path)
    folder.write(name(1), data(1))
    (tmp_path / SUBFOLDER / PARTS).rmdir()
    file_of(tmp_path, 1).unlink()
    (tmp_path / SUBFOLDER / KEY).rmdir()
    (tmp_path / SUBFOLDER).rmdir()
    assert folder.read(name(1)) is None
    assert folder.write(name(1), data(1))
    assert folder.read(name(1)) == data(1)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    folder = opened(tmp_path)
    (tmp_path / SUBFOLDER / KEY).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert not folder.write(name(1), data(1))
        assert not folder.write(name(2), data(2))
    assert len(caplog.messages) == 1
    assert folder.counted()["write_errors"] == 2
    assert folder.num_pages == 0
    assert not list((tmp_path / SUBFOLDER / PARTS).iterdir()), "nothing is left of them"
    (tmp_path / SUBFOLDER / KEY).unlink()
    assert folder.write(name(1), data(1))


def test_a_full_disk_is_a_warning(tmp_path, caplog):
    """A limit on the size of files fails a write in the middle, as a full disk does."""
    folder, before = opened(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 50, before[1]))
        assert not folder.write(name(1), data(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot be written" in caplog.text
    assert not folder.has(name(1))
    assert not list((tmp_path / SUBFOLDER / PARTS).iterdir()), "nothing is left of it"
    assert folder.write(name(1), data(1))


def test_what_a_server_left_half_written_is_removed_in_time(tmp_path):
    clock = Clock()
    folder = opened(tmp_path, clock=clock)
    part = tmp_path / SUBFOLDER / PARTS / "1-abc"
    part.write_bytes(b"half")
    os.utime(part, ns=(clock.now_ns, clock.now_ns))
    folder.scan()
    assert part.exists(), "its server may be writing it"
    clock.now_ns += 3601 * 10**9
    folder.scan()
    assert not part.exists()


def test_servers_that_write_the_same_pages_at_once_do_not_hurt_each_other(tmp_path):
    folders = [opened(tmp_path, max_bytes=6 * SIZE) for _ in range(3)]
    wrong: list[str] = []

    def work(folder: PageFolder) -> None:
        for round_ in range(30):
            for number in range(10):
                folder.write(name(number), data(number))
                found = folder.read(name((number + round_) % 10))
                if found is not None and found != data((number + round_) % 10):
                    wrong.append(f"page {number} has other bytes")
            folder.scan()

    threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(folder.counted()[key] for folder in folders for key in ("read_errors", "removed_corrupt"))
    folders[0].scan()
    assert folders[0].num_bytes <= 6 * SIZE * 3


@pytest.mark.parametrize("problem", ["missing", "a file"])
def test_a_folder_that_cannot_be_listed_is_a_warning(tmp_path, caplog, problem):
    root = tmp_path / "folder"
    if problem == "a file":
        root.write_text("")
    else:
        root.symlink_to(tmp_path / "nowhere" / "else")
    folder = PageFolder(root, FILES, 2**20)
    folder.scan()
    assert folder.num_pages == 0
    assert "cannot be listed" in caplog.text
