from pathlib import Path

import pytest

from tests.core.mutant import Mutant, apply, outdated
from tests.core.mutants import MUTANTS, ROOT

MUTANT = Mutant("one is two", "core/numbers.py", "x = 1", "x = 2")


def test_a_mutant_has_its_fault_in_place_of_its_line():
    assert apply(MUTANT, "x = 1\ny = 1\n") == "x = 2\ny = 1\n"


def test_a_mutant_whose_line_is_gone_is_reported():
    with pytest.raises(LookupError, match=r"one is two: core/numbers.py has no line 'x = 1' any more"):
        apply(MUTANT, "y = 1\n")


def test_a_mutant_whose_line_is_ambiguous_is_reported():
    with pytest.raises(LookupError, match="more than once"):
        apply(MUTANT, "x = 1\nx = 1\n")
    with pytest.raises(LookupError, match="more than once"):
        apply(MUTANT._replace(within="def f"), "def f(): ...\ndef f(): ...\nx = 1\n")


def test_a_mutant_with_a_place_breaks_the_first_line_after_it():
    assert apply(MUTANT._replace(within="y"), "x = 1\ny = 1\nx = 1\nx = 1\n") == "x = 1\ny = 1\nx = 2\nx = 1\n"


def test_every_mutant_fits_the_source():
    assert outdated(MUTANTS, ROOT / "quire") == []


def test_a_mutant_that_changes_nothing_is_reported():
    with pytest.raises(LookupError, match="the fault is the line itself"):
        apply(MUTANT._replace(fault="x = 1"), "x = 1\n")


def test_a_mutant_that_is_no_python_is_reported():
    with pytest.raises(LookupError, match="is no Python"):
        apply(MUTANT._replace(fault="x ="), "x = 1\n")


def test_every_mutant_that_does_not_fit_the_source_is_named(tmp_path: Path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core/numbers.py").write_text("x = 1\n")
    lost = MUTANT._replace(name="lost", line="z = 1")
    moved = MUTANT._replace(name="moved", path="core/letters.py")
    lines = outdated([lost, MUTANT, moved], tmp_path)
    assert len(lines) == 2
    assert "lost: core/numbers.py has no line 'z = 1' any more" in lines[0]
    assert "core/letters.py" in lines[1]
