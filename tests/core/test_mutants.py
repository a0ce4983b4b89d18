import pytest

from tests.core.mutants import MUTANTS, ROOT, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_still_applies(mutant):
    source = (ROOT / "quire" / mutant.path).read_text()
    broken = apply(mutant, source)
    assert broken != source
    compile(broken, mutant.path, "exec")


def test_a_mutant_whose_line_is_gone_is_reported():
    with pytest.raises(LookupError, match=r"has no line .* any more"):
        apply(MUTANTS[0]._replace(line="what is not there"), "x = 1\n")


def test_a_mutant_whose_line_is_ambiguous_is_reported():
    with pytest.raises(LookupError, match="more than once"):
        apply(MUTANTS[0]._replace(line="x = 1"), "x = 1\nx = 1\n")
