"""The head of a checkpoint whose config ties it to the embedding."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quire.files.model_files import ModelFiles
from quire.files.safetensors_source import SafetensorsSource
from quire.files.tensor_source import Array, TensorSource
from quire.models.registry import build_model

log = logging.getLogger(__name__)

_ROWS = 4096  # that are compared at once


def with_stored_head(files: ModelFiles, source: TensorSource | None) -> ModelFiles:
    """The files with a config that ties nothing, where the checkpoint has a head that is not its embedding.

    Some tools train a head by itself and leave the config as it was. A copy of the embedding is not used.
    """
    if not isinstance(source, SafetensorsSource) or build_model(files.config).head is not None:
        return files
    config = _untied(files.config)
    model = build_model(config)
    stored = {model.canonical_name(name): name for name in source.tensors()}
    assert model.head is not None
    embedding, head = (stored.get(param.sources[0].name) for param in (model.embedding, model.head))
    if embedding is None or head is None or _is_same(source, embedding, head):
        return files
    log.warning("%s: %s is used; it differs from %s, to which the config ties it", files.name, head, embedding)
    return replace(files, config=config)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    untied = {**config, "tie_word_embeddings": False}
    if config.get("text_config") is not None:
        untied["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return untied


def _is_same(source: SafetensorsSource, one: str, other: str) -> bool:
    infos = source.tensors()
    if infos[one].shape != infos[other].shape:
        return False
    first, second = source.read(one), source.read(other)

    def rows(tensor: Array, begin: int) -> Array:
        part = tensor[begin : begin + _ROWS]
        return part if first.dtype == second.dtype else part.astype(np.float32)

    return all(np.array_equal(rows(first, at), rows(second, at)) for at in range(0, len(first), _ROWS))
