"""Reference pages are what the code says now; `make docs-reference` writes them."""

import pytest

from quire.models.registry import FAMILIES
from tests.docs.family_features import BEGIN, END
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
    assert [family for family in FAMILIES if page.count(f"| `{family}` |") != 2] == []  # examples, and features


def test_the_table_of_features_says_what_families_differ_in():
    lines = PAGES["../models.md"]().split(BEGIN)[1].split(END)[0].splitlines()
    rows = {
        line.split("`")[1]: line.strip("| ").split(" | ")[1:]
        for line in lines
        if line.startswith("| `") and "---" not in line
    }
    assert rows["llama"][:6] == ["full", "", "all but mxfp4", "yes", "", "yes"]
    assert rows["gpt_oss"][:3] == ["full, window, sinks", "yes", "mxfp4; others apart from experts"]
    assert rows["deepseek_v3"][0] == "latent"
    assert rows["gpt2"][2] == ""
    assert rows["qwen3_next"][0] == "full, recurrent"
    assert rows["qwen3_next"][3:5] == ["with snapshots", "`--speculate`, `--host-cache-gib`, `--reproducible` on a GPU"]
    assert rows["deepseek_v2"][4] == "`--kv-cache-dtype` of 8 bits, `--reproducible` on a GPU"
    assert "`kv_a_proj_with_mqa`" in rows["deepseek_v2"][-1]
