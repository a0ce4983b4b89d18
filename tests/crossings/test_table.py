"""The table of capabilities is complete, and says of every pair whether it goes together."""

from collections import Counter

from tests.crossings.capability import Layout, RequestField, ServerCapability
from tests.crossings.covering import covering_sets, pairs_of
from tests.crossings.owners import CROSSES_NOTHING, OWNED
from tests.crossings.refusals import REFUSALS
from tests.crossings.table import ENTRIES, TABLE


def test_every_setting_and_field_has_an_entry() -> None:
    """A new one is covered by a capability of the table, or is listed with the reason why it crosses nothing."""
    covered = {name for one in ENTRIES for name in one.covers}
    missing = [name for name in OWNED if name not in covered and name not in CROSSES_NOTHING]
    assert not missing, f"in no entry of tests/crossings: {', '.join(missing)}; CONTRIBUTING.md says how to add them"


def test_no_entry_stands_for_what_is_not_there() -> None:
    known = set(OWNED)
    covered = [name for one in ENTRIES for name in one.covers] + list(CROSSES_NOTHING)
    assert not [name for name in covered if name not in known]
    assert not [name for name, count in Counter(covered).items() if count > 1], "two entries stand for one"


def test_names_are_those_of_one_entry_each() -> None:
    assert len(TABLE) == len(ENTRIES)
    named = [name for one in ENTRIES for name in one.needs]
    named += [name for one in REFUSALS for name in (one.one, one.other)]
    assert not [name for name in named if name not in TABLE]


def test_an_entry_is_crossed_somewhere() -> None:
    for one in ENTRIES:
        assert one.in_fake or one.in_models or isinstance(one, ServerCapability), f"{one.name} is crossed nowhere"


def test_covering_sets_have_every_pair_that_goes_together() -> None:
    from random import Random

    capabilities = [one for one in ENTRIES if one.in_fake]
    sets = covering_sets(capabilities, 8, Random(0))
    had = set().union(*(pairs_of(one) for one in sets))
    assert pairs_of(capabilities) <= had
    for one in sets:
        assert sum(isinstance(capability, Layout) for capability in one) == 1
    assert frozenset(("no end", "grammar")) in had, "requests with one run beside requests with the other"
    assert frozenset(("no prefix cache", "host tier")) not in had
    assert any(isinstance(capability, RequestField) for one in sets for capability in one)
