"""The masks of tokens that grammars allow, as the programs that sample take them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from quire.core.plan import StepPlan
from quire.executor.launch import Launch, num_samples
from quire.request import num_mask_words
from quire.sharding import put

ALL = 0xFFFFFFFF  # tokens of a word are allowed


class MaskRows:
    """Fills a row for each token to sample; where no row has a mask, it is an array that is on the device already."""

    def __init__(self, vocab_size: int, where: Sharding | None) -> None:
        self._num_words = num_mask_words(vocab_size)
        self._where = where
        self._without: dict[int, jax.Array] = {}

    def fill(self, plan: StepPlan, launch: Launch, size: int, masks: dict[int, bytes]) -> Any:
        """`size` rows. `masks` are by the index of the chunk."""
        if not any(index in masks for index in launch.indices):
            if size not in self._without:
                self._without[size] = put(np.full((size, self._num_words), ALL, np.uint32), self._where)
            return self._without[size]
        rows = np.full((size, self._num_words), ALL, np.uint32)
        row = 0
        for index in launch.samples(plan.chunks):
            if index in masks and plan.chunks[index].samples:
                rows[row] = np.frombuffer(masks[index], np.uint32)
            row += max(1, num_samples(plan.chunks[index]))
        return rows
