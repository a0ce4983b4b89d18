"""Adapters given at the start: their names, and the revisions of those that are on the hub."""

from pathlib import Path

from quire.files.peft import locate_adapter
from quire.settings.adapters import adapter_places
from quire.settings.config import Config


def places(*given: str) -> dict[str, str]:
    return adapter_places(Config(model="m", lora_adapters=given))


def test_a_revision_is_no_part_of_the_name() -> None:
    assert places("org/style@v2", "sql=org/sql@v3,org/plain") == {
        "org/style": "org/style@v2",
        "sql": "org/sql@v3",
        "org/plain": "org/plain",
    }
    assert places("./here/a@b") == {"./here/a@b": "./here/a@b"}, "a folder has no revisions"


def test_a_revision_is_what_is_fetched(tmp_path: Path) -> None:
    """Of two that the local cache of the hub has."""
    repository = tmp_path / "hub" / "models--org--style"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("v1", "1" * 40), ("v2", "2" * 40)):
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
    for place in places("org/style@v2", "other=org/style@v2").values():
        assert locate_adapter(place, offline=True, cache_dir=tmp_path).name == "2" * 40
