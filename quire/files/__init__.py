"""Model files: finding them, fetching them, reading what they hold. No JAX here."""

from quire.files.generation_defaults import GenerationDefaults
from quire.files.model_files import ModelFiles, locate
from quire.files.progress import Progress, progress_bar, share_bar, silent
from quire.files.tensor_source import TensorInfo, TensorSource

__all__ = [
    "GenerationDefaults",
    "ModelFiles",
    "Progress",
    "TensorInfo",
    "TensorSource",
    "locate",
    "progress_bar",
    "share_bar",
    "silent",
]
