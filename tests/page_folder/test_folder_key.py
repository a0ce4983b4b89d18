"""The name of a model's pages in a folder."""

import os
from pathlib import Path

from quire.engine.building.folder import folder_key
from quire.engine.building.peers import peer_facts
from quire.engine.building.plan import plan_deployment
from quire.settings.config import Config
from tests.chaos.test_model import write_poisoned_model


def test_a_weight_file_that_is_changed_in_place_is_another_model(tmp_path: Path) -> None:
    """Where none of its samples changes, which only its time tells. Peers, which run at once, are not told apart."""
    model = Path(write_poisoned_model(tmp_path / "tiny"))
    deployment = plan_deployment(Config(str(model), cache_dir=str(tmp_path / "cache")))
    key, facts = folder_key(deployment), peer_facts(deployment)
    assert folder_key(deployment) == key
    weights = model / "model.safetensors"
    found = weights.stat()
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns + 1000))
    assert folder_key(deployment) != key
    assert peer_facts(deployment) == facts
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert folder_key(deployment) == key
