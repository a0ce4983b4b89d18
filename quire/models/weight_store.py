"""Packed weights on disk, so that a second start neither reads nor packs the checkpoint."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

import jax
import numpy as np

from quire.files.array_file import Array, DamagedFile, read_arrays, write_arrays
from quire.files.cache_folder import is_left_unfinished, last_use_s
from quire.files.tensor_source import file_identities
from quire.models.checkpoint import for_kernels, leaves, map_params, placed
from quire.models.model import Model
from quire.models.params import Param, ParamTree
from quire.ops.native.int8_product import tiles_shape
from quire.ops.weights.int8 import Packed
from quire.settings.memory import as_size

log = logging.getLogger(__name__)

WEIGHTS_FOLDER = "weights"  # in the cache folder
KEY_LENGTH = 32
NAME = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}\.weights")
KEPT_FILES = 4  # those that were used last
MAX_SHARE = 0.25  # of the free disk space, for one file


class WeightStore:
    """A folder of weights, each packed for the native kernels from one checkpoint, by this code.

    Files appear whole and are never changed, so that several processes may map and write them at the same time. The
    folder is as trusted as this code is.
    """

    def __init__(self, folder: Path, checkpoint: Iterable[Path], identity: Sequence[str]) -> None:
        """`identity` says all that the numbers depend on besides the checkpoint's files: this code, the processor."""
        parts = [*file_identities(checkpoint), *identity]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:KEY_LENGTH]
        self._path = folder / f"{key}.weights"
        self.saving: Thread | None = None

    def load(self, model: Model, make: Callable[[], ParamTree]) -> ParamTree:
        """The kept weights of a model, mapped; or those that `make` gives, which a thread then keeps."""
        params = model.params()
        arrays = self._find(leaves(params))
        if arrays is not None:
            left = iter(arrays)
            return map_params(lambda param: _on_device(next(left), param), params)
        weights = make()
        # Not a daemon: a process that answers one prompt and ends keeps them too.
        self.saving = Thread(target=self._save, args=(jax.tree.leaves(weights),), name="quire-keep-weights")
        self.saving.start()
        return weights

    def _find(self, params: Sequence[Param]) -> list[Array] | None:
        try:
            arrays = read_arrays(self._path)
            expected = [_kept_shape(param) for param in params]
            if [array.shape for array in arrays] != expected:
                raise DamagedFile(f"{self._path}: holds other arrays than the model has")
        except FileNotFoundError:
            return None
        except (DamagedFile, OSError, ValueError, TypeError) as error:  # what a damaged file can lead to
            log.warning("the packed weights cannot be used and are made again: %s", error)
            return None
        with contextlib.suppress(OSError):  # where it may only be read
            os.utime(self._path)
        return arrays

    def _save(self, weights: Sequence[jax.Array]) -> None:
        unfinished = self._path.with_suffix(f".{os.getpid()}{get_ident()}")
        arrays = [np.asarray(weight) for weight in weights]
        num_bytes = sum(array.nbytes for array in arrays)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._tidy()
            free = shutil.disk_usage(self._path.parent).free
            if num_bytes > MAX_SHARE * free:
                sizes = as_size(num_bytes), as_size(free)
                log.info("the packed weights, %s, are not kept for the next start: the disk has %s left", *sizes)
                return
            write_arrays(unfinished, arrays)
            unfinished.replace(self._path)
        except OSError as error:
            log.warning("the packed weights cannot be kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)  # on a full disk it would take what is left

    def _tidy(self) -> None:
        """Make room for one: delete what others were used after, and what ended processes left unfinished."""
        kept = []
        for path in self._path.parent.iterdir():
            if NAME.fullmatch(path.name):
                kept.append(path)
            elif path.suffix[1:].isdecimal() and is_left_unfinished(path):
                path.unlink(missing_ok=True)
        last_first = sorted(kept, key=last_use_s, reverse=True)
        for path in last_first[KEPT_FILES - 1 :]:
            log.info("packed weights that %d others were used after are deleted: %s", KEPT_FILES - 1, path)
            path.unlink(missing_ok=True)  # processes that have it mapped keep it


def kept_bytes(folder: Path) -> int:
    """Bytes of all packed weights in a folder."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if NAME.fullmatch(path.name))
    except OSError:
        return 0


def _kept_shape(param: Param) -> tuple[int, ...]:
    if param.is_of_experts:
        return (param.shape[0], *tiles_shape(param.shape[1:], 1))
    return tiles_shape(param.shape, param.num_contracted) if param.num_contracted else param.shape


def _on_device(array: Array, param: Param) -> Any:
    is_packed = param.is_of_experts or param.num_contracted > 0
    weight = Packed(array, param.shape, param.contracted) if is_packed else param.plain(array)
    return for_kernels(placed(weight, param, None), None)
