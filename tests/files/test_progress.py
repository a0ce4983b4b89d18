import pytest

from quire.files.progress import progress_bar, share_bar, silent


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
