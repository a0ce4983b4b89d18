"""Finds the draft model, and checks that it fits the served model."""

from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidSetting
from quire.executor.layer_state import PageLayout, page_layout
from quire.files.model_files import ModelFiles, locate
from quire.files.progress import Progress
from quire.files.tensor_source import TensorSource
from quire.models.checkpoint import load_weights, stored_names
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.params import ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.models.stored_head import with_stored_head
from quire.settings.config import Config
from quire.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class DraftPlan:
    """The model that guesses, before any weight is read."""

    files: ModelFiles
    source: TensorSource | None  # None for random weights
    model: Decoder

    def layout(self, page_size: int, max_total_tokens: int, page_dtype: str) -> PageLayout:
        """All layers in one group, since they share the pages of the group that keeps all positions."""
        return page_layout(
            self.model.layers, page_size, max_total_tokens, page_dtype, max_groups=1, page_dtype=page_dtype
        )

    def load(self, seed: int, **arguments: Any) -> ParamTree:
        if self.source is None:
            return random_weights(self.model, seed=seed, **arguments)
        return load_weights(self.model, self.source, **arguments)


def find_draft(config: Config, files: ModelFiles, model: Decoder, progress: Progress) -> DraftPlan | None:
    """The draft that `config` asks for, for a model with these files. Raises where it cannot guess for that model."""
    if config.draft_model is None:
        return None
    draft_files = locate(config.draft_model, **config.hub_access, progress=progress)
    source = open_checkpoint(draft_files)
    draft_files = with_stored_head(draft_files, source)
    draft = build_model(draft_files.config)
    if source is not None:
        stored_names(draft, source)
    if draft.vocab_size != model.vocab_size:
        raise InvalidSetting(
            f"draft_model {draft_files.name} has {draft.vocab_size} tokens, {files.name} has {model.vocab_size}; they "
            "must have the same vocabulary"
        )
    _refuse_other_tokens(draft_files, files, model.vocab_size)
    return DraftPlan(draft_files, source, draft)


def check_draft(draft: DraftPlan, max_total_tokens: int) -> None:
    if draft.model.max_positions < max_total_tokens:
        raise InvalidSetting(
            f"draft_model {draft.files.name} has {draft.model.max_positions} positions; max_total_tokens is "
            f"{max_total_tokens}"
        )


def _refuse_other_tokens(draft: ModelFiles, files: ModelFiles, vocab_size: int) -> None:
    if draft.tokenizer is None or files.tokenizer is None or draft.tokenizer == files.tokenizer:
        return
    ours, theirs = load_tokenizer(files.tokenizer), load_tokenizer(draft.tokenizer)
    for token in range(vocab_size):
        here, there = ours.token_bytes(token), theirs.token_bytes(token)
        if here != there:
            raise InvalidSetting(
                f"draft_model {draft.name} has another vocabulary than {files.name}: token {token} is {there!r} there "
                f"and {here!r} here"
            )
