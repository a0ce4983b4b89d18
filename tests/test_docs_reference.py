"""Reference pages are what the code says now; `make docs-reference` writes them."""

import pytest

from quire.models.registry import FAMILIES
from tests.docs.reference import PAGES, REFERENCE, families, serve_options


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_current(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run make docs-reference"


def test_every_setting_and_every_metric_has_a_row():
    settings, metrics = PAGES["settings.md"](), PAGES["metrics.md"]()
    assert all(
        f"`{option.opts[0]}`" in settings for option in serve_options() if "text-gen" not in option.rich_help_panel
    )
    assert all(f"| `{family.name}` |" in metrics for family in families())


def test_every_family_of_models_has_a_row():
    page = (REFERENCE.parent / "models.md").read_text(encoding="utf-8")
    assert [family for family in FAMILIES if f"| `{family}` |" not in page] == []
