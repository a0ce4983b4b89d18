"""A tokenizer that is named apart from its model."""

import os
from pathlib import Path

from quire.errors import InvalidSetting, ModelUnavailable, shown
from quire.files.cache_folder import hub_folder
from quire.files.hub import fetch_tokenizer, parse_repository

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a folder with a tokenizer has one of them


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def locate_tokenizer(
    place: str,
    *,
    token: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    hub_cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder or GGUF file of a tokenizer: `place` is one, a tokenizer.json, or `org/name[@revision]` on the hub."""
    path = Path(os.path.expanduser(place))
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.name != "tokenizer.json":
            raise InvalidSetting(f"tokenizer is {shown(place)}; it can be a folder, a .gguf file or a tokenizer.json")
        return path.parent
    if not path.is_dir():
        repository = parse_repository(place)
        if repository is None or repository.gguf is not None or "/" not in repository.id:
            raise ModelUnavailable(f"tokenizer is {shown(place)}: no such file or folder, nor a repository on the hub")
        hub = hub_folder(cache_dir, hub_cache)
        path = fetch_tokenizer(
            repository.id, revision=repository.revision, token=token, offline=offline, cache_dir=hub, endpoint=endpoint
        )
    if not has_tokenizer(path):
        raise InvalidSetting(f"tokenizer is {shown(place)}, which has none of {', '.join(TOKENIZER_FILES)}")
    return path
