"""The fingerprint by which members find out that they have the same model."""

import json
import shutil
from pathlib import Path

import pytest

from quire.engine.building.fingerprint import SAMPLE_BYTES, fingerprint
from quire.files.model_files import locate
from tests.chaos.test_model import write_poisoned_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_poisoned_model(tmp_path_factory.mktemp("tiny")))


def of(folder: Path) -> str:
    return fingerprint(locate(str(folder)))


def test_a_copy_in_another_place_is_the_same_model(model: Path, tmp_path: Path) -> None:
    assert of(Path(shutil.copytree(model, tmp_path / "elsewhere"))) == of(model)


def test_another_config_is_another_model(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert of(copy) != of(model)


@pytest.mark.parametrize("at", [-1, -SAMPLE_BYTES])
def test_other_weights_are_another_model(model: Path, tmp_path: Path, at: int) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[at] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert of(copy) != of(model)
