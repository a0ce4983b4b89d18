"""The names that `--quantize` takes for the method of a quantised checkpoint."""

from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.models.formats.quantized_source import READERS, read_quantization
from quire.settings.config import Config
from quire.settings.dtypes import METHODS, OTHER_NAMES, resolve_quantize
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS


def resolved(asked: str, summary: str | None) -> str:
    return resolve_quantize("cpu", Config(quantize=asked), fast_int8=True, quantization=summary).value


def summary_of(config: dict[str, Any]) -> str:
    found = read_quantization({**CASES["llama"], "quantization_config": config})
    assert found is not None
    return found.summary


@pytest.mark.parametrize("name", FORMATS)
def test_its_own_name_leaves_a_checkpoint_as_it_is(name: str) -> None:
    config = FORMATS[name].config
    assert resolved(config["quant_method"], summary_of(config)) == "none"
    others = [
        one for one in METHODS if one != config["quant_method"] and (one, config["quant_method"]) not in OTHER_NAMES
    ]
    assert len(others) >= len(METHODS) - 2
    for other in others:
        with pytest.raises(InvalidSetting, match=f"quantize is '{other}'; the checkpoint is {config['quant_method']}"):
            resolved(other, summary_of(config))


def test_every_method_that_is_read_has_a_name() -> None:
    assert set(READERS) - {name for name, _ in OTHER_NAMES} == set(METHODS) - {"fp8"}
    assert "fp8" in READERS


@pytest.mark.parametrize(
    ("asked", "name"),
    [("fp8", "fbgemm-fp8"), ("modelopt_fp4", "modelopt-fp8"), ("intel/auto-round", "auto-round")],
)
def test_names_that_other_servers_have_are_taken_too(asked: str, name: str) -> None:
    assert resolved(asked, summary_of(FORMATS[name].config)) == "none"
    with pytest.raises(InvalidSetting, match=f"quantize is '{asked}'; the checkpoint is gptq"):
        resolved(asked, summary_of(FORMATS["gptq-4"].config))
