"""Digests by which engines find out that they compute the same numbers."""

import hashlib
import json
import os
from pathlib import Path

import jax

import quire
from quire.executor.programs.store import sources_digest
from quire.files.model_files import ModelFiles
from quire.files.regular_file import open_regular
from quire.ops.native.processor import instruction_set

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weight file


def program_facts(files: ModelFiles) -> dict[str, str]:
    """Known before engines meet, and equal for all that must compute the same numbers."""
    return {
        "version": quire.__version__,
        "code": sources_digest()[:16],
        "jax": jax.__version__,
        "model": fingerprint(files),
        "processor": hashlib.sha256(instruction_set().encode()).hexdigest()[:16],
    }


def fingerprint(files: ModelFiles) -> str:
    """A digest of the config and of the weight files: their sizes, beginnings, ends, and samples between. Not of names:
    members may keep the model in different places."""
    digest = hashlib.sha256(json.dumps(files.config, sort_keys=True, default=str).encode())
    for path in weight_paths(files):
        digest.update(_sampled(path))
    return f"{files.config.get('model_type', '?')} {digest.hexdigest()[:16]}"


def weight_paths(files: ModelFiles) -> list[Path]:
    """None for random weights."""
    if files.path is None:
        return []
    return [files.path] if files.path.is_file() else sorted(files.path.glob("*.safetensors"))


def _sampled(path: Path) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for number in range(SAMPLES + 1):
            file.seek(number * max(0, size - SAMPLE_BYTES) // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
