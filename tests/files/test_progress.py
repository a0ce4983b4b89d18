import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import TextIO

import pytest

from quire.files.progress import progress_bar, share_bar, silent
from quire.files.standard_error import show


def test_a_bar_ends_on_standard_error_with_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Fetching it") as report:
        report(1_000_000, 2_000_000)
        report(2_000_000, 2_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Fetching it" in captured.err
    assert "2.0/2.0 MB" in captured.err


def test_a_share_is_told_in_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with share_bar("Compiling") as report:
        report(3, 12)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Compiling" in captured.err
    assert "25%" in captured.err


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with silent("Fetching it") as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")


def _full_disk() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def _gone_reader() -> TextIO:
    ours, theirs = os.pipe()
    os.close(ours)
    return open(theirs, "w", buffering=1)


@pytest.mark.parametrize("open_stream", [_full_disk, _gone_reader])
def test_work_goes_on_where_its_progress_cannot_be_shown(open_stream: Callable[[], TextIO]) -> None:
    """An engine that starts again loads a model behind a bar: it must not fail because the disk of the log is full."""
    stream = open_stream()
    done = []
    with redirect_stderr(stream):
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            print("a line", file=sys.stderr)
        for bar in (progress_bar, share_bar):
            with bar("Loading") as report:
                report(1, 2)
                done.append(bar)
            show("Ready.")
    assert done == [progress_bar, share_bar]
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left in its buffer goes there
    stream.close()


def test_a_process_without_standard_error_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(None):
        with progress_bar("Loading") as report:
            report(1, 2)
        show("Ready.")
    assert capsys.readouterr() == ("", "")
