"""A model's files: found, fetched where needed, and their small parts read."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quire.errors import InvalidCheckpoint, ModelUnavailable, shown
from quire.files.cache_folder import cache_folder, hub_folder
from quire.files.generation_defaults import (
    GenerationDefaults,
    eos_token_ids,
    eos_token_ids_from_gguf,
    generation_defaults,
    generation_defaults_from_gguf,
)
from quire.files.gguf_source import GGUFSource
from quire.files.hub import fetch_repository, parse_repository
from quire.files.json_file import read_json, read_json_if_present
from quire.files.named_tokenizer import has_tokenizer, locate_tokenizer
from quire.files.packaged_model import DEFAULT_MODEL
from quire.files.progress import Progress, progress_bar, silent
from quire.files.safetensors_source import SafetensorsSource, weight_files
from quire.files.shapes import SHAPES

_RANDOM_PREFIX = "random:"


@dataclass(frozen=True)
class ModelFiles:
    """The place of a model on this machine, and what its files say besides the weights.

    `path` is a folder, or a GGUF file; random weights have none. `tokenizer` is the folder or GGUF file that holds
    tokenizer and chat template. `eos_token_ids` is sorted, without repeats, from every file that names any.
    """

    kind: Literal["safetensors", "gguf", "random"]
    name: str
    path: Path | None
    config: dict[str, Any]
    generation: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    tokenizer: Path | None
    gguf: GGUFSource | None = field(default=None, repr=False, compare=False)  # its header has been read

    def open_weights(self) -> GGUFSource | SafetensorsSource | None:
        """The checkpoint; None for random weights, which no file holds."""
        if self.path is None:
            return None
        return self.gguf or SafetensorsSource(self.path)


def locate(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    hub_cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = silent,
    tokenizer: str | None = None,
) -> ModelFiles:
    """The files of `model`, with another `tokenizer` if it is named. A model is one of

    - `default` or its name: the packaged model;
    - `random:` and a config.json, a folder that has one, or a name from `shapes.py`;
    - a folder or a .gguf file;
    - `org/name[@revision]`: a repository of the hub; `org/name:TYPE` and `org/name/FILE.gguf` take one GGUF file of it.
    """
    if tokenizer is not None:
        hub: dict[str, Any] = {
            "token": token, "offline": offline, "cache_dir": cache_dir, "hub_cache": hub_cache, "endpoint": endpoint,
        }  # fmt: skip
        named = locate_tokenizer(tokenizer, **hub)
        return replace(locate(model, revision=revision, **hub, progress=progress), tokenizer=named)
    if model in ("default", DEFAULT_MODEL.name):
        _refuse_revision(model, revision)
        cache = cache_folder(cache_dir)
        return _from_gguf(DEFAULT_MODEL.fetch(cache, offline=offline, progress=progress), DEFAULT_MODEL.name)
    path = Path(os.path.expanduser(model))  # Path's own raises where there is no such home
    try:
        if model.startswith(_RANDOM_PREFIX):
            _refuse_revision(model, revision)
            return _random(model.removeprefix(_RANDOM_PREFIX), model)
        if model and path.exists():  # an empty path would be the current folder
            _refuse_revision(model, revision)
            return _local(path, model)
    except OSError as error:  # of a folder that may not be looked into, or a name that no file can have
        raise ModelUnavailable(f"{shown(model)} cannot be read: {error.strerror}") from error
    repository = parse_repository(model)
    if repository is None or repository.id.endswith(".gguf"):
        raise ModelUnavailable(f"{model!r}: no such file or folder")
    if repository.revision is not None and revision not in (None, repository.revision):
        raise ModelUnavailable(f"{model} names a revision, and {revision!r} was asked for besides")
    found = fetch_repository(
        repository.id,
        gguf=repository.gguf,
        revision=repository.revision or revision,
        token=token,
        offline=offline,
        cache_dir=hub_folder(cache_dir, hub_cache),
        endpoint=endpoint,
        show_progress=progress is progress_bar,
    )
    return _from_folder(found, repository.id) if found.is_dir() else _from_gguf(found, model.partition("@")[0])


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelUnavailable(
            f"{model} has no revisions, and {revision!r} was asked for; only hub repositories have them"
        )


def _local(path: Path, name: str) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidCheckpoint(f"{path}: a model is a folder or a .gguf file")
        return _from_gguf(path, path.stem)
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], ggufs[0].stem)
        if ggufs:
            raise InvalidCheckpoint(f"{path}: {len(ggufs)} GGUF files; name one: {', '.join(g.name for g in ggufs)}")
    return _from_folder(path, path.resolve().name or name)


def _from_gguf(path: Path, name: str) -> ModelFiles:
    source = GGUFSource(path)
    return ModelFiles(
        kind="gguf",
        name=name,
        path=source.path,
        config=source.config,
        generation=generation_defaults_from_gguf(source.metadata, path),
        eos_token_ids=eos_token_ids_from_gguf(source.metadata, path),
        tokenizer=source.path if "tokenizer.ggml.tokens" in source.metadata else None,
        gguf=source,
    )


def _from_folder(folder: Path, name: str) -> ModelFiles:
    if not weight_files(folder):
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f"; it has {', '.join(others)}, which can run code when read: convert it to safetensors" if others else ""
        )
        raise InvalidCheckpoint(f"{folder}: no safetensors files{hint}")
    return _described(folder, "safetensors", name, folder)


def _random(what: str, name: str) -> ModelFiles:
    path = Path(os.path.expanduser(what))
    if what in SHAPES:
        return ModelFiles("random", name, None, dict(SHAPES[what]), GenerationDefaults(), (), None)
    if what and path.is_dir():
        return _described(path, "random", name, None)
    if path.is_file():
        if path.suffix == ".gguf":
            found = _from_gguf(path, name)
            return ModelFiles(
                "random", name, None, found.config, found.generation, found.eos_token_ids, found.tokenizer
            )
        config = read_json(path)
        return ModelFiles(
            "random",
            name,
            None,
            config,
            GenerationDefaults(),
            eos_token_ids(path.parent, config, {}),
            _tokenizer(path.parent),
        )
    raise ModelUnavailable(
        f"{name}: {what!r} is neither a config.json, a folder with one, nor a known shape: {', '.join(SHAPES)}"
    )


def _described(folder: Path, kind: Literal["safetensors", "random"], name: str, path: Path | None) -> ModelFiles:
    config = _with_quantization(read_json(folder / "config.json"), folder)
    generation_path = folder / "generation_config.json"
    generation_config = read_json_if_present(generation_path)
    return ModelFiles(
        kind=kind,
        name=name,
        path=path,
        config=config,
        generation=generation_defaults(generation_config, generation_path),
        eos_token_ids=eos_token_ids(folder, config, generation_config),
        tokenizer=_tokenizer(folder),
    )


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the quantisation that ModelOpt wrote into a file of its own, where it has none."""
    text = config.get("text_config")
    stored = [part.get("quantization_config") for part in (config, text) if isinstance(part, dict)]
    path = folder / "hf_quant_config.json"
    if any(stored) or not path.exists():
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **read_json(path)}}


def _tokenizer(folder: Path) -> Path | None:
    return folder if has_tokenizer(folder) else None
