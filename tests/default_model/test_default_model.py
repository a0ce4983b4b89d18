"""The default model, from its package to its answers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.layer_state import PagedStates, page_layout
from quire.files.gguf import read_metadata
from quire.files.model_files import ModelFiles, locate
from quire.models.checkpoint import load_weights
from quire.models.context import PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.text.chat import load_chat_templates
from quire.text.tokenizer import load_tokenizer
from tests.compiling import AS_SERVED
from tests.default_model.make import prompt_token_ids
from tests.models.gguf_reference import transformers_model
from tests.models.tiny import attend_pages, rows_of, whole_logits

EXPECTED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("expected.json").read_text())
PAGE_SIZE = 16
# How far the logits of two implementations in float32 lie apart at most; tested against transformers below.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    """Fetched on the first run and found in the user's cache on the next."""
    return locate("default")


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    """The same file in transformers."""
    assert files.path is not None
    return transformers_model(files.path)


def greedy(model: Model, weights: ParamTree, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts together: one step for their tokens, then one for each token of every answer."""
    rows = len(prompts)
    pages_per_row = -(-(max(map(len, prompts)) + count) // PAGE_SIZE)
    table = jnp.arange(1, rows * pages_per_row + 1).reshape(rows, pages_per_row)
    layout = page_layout(model.layers, PAGE_SIZE, pages_per_row * PAGE_SIZE, jnp.float32, max_groups=1)
    pages = layout.empty(rows * pages_per_row + 1)

    @partial(jax.jit, compiler_options=AS_SERVED)
    def step(weights: ParamTree, context: TokenContext, rows: jax.Array, last: jax.Array, pages: Any) -> Any:
        states = PagedStates(layout, pages, [rows_of(table, rows, context.positions, PAGE_SIZE)])
        hidden, states = model.forward(weights, context, states, PlatformOps(attend_pages))
        return jnp.argmax(model.logits(weights, hidden[last]), axis=-1), states.arrays

    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = jnp.asarray(np.concatenate(prompts))
    row_of_token = jnp.asarray(np.repeat(np.arange(rows), lengths))
    positions = jnp.asarray(np.concatenate([np.arange(length) for length in lengths]))
    last = jnp.asarray(np.cumsum(lengths) - 1)
    answers = []
    for _ in range(count):
        tokens, pages = step(weights, TokenContext(tokens, positions), row_of_token, last, pages)
        answers.append(np.asarray(tokens))
        positions, row_of_token, last = positions[last] + 1, jnp.arange(rows), jnp.arange(rows)
    return np.stack(answers, axis=1).tolist()


def test_its_greedy_answers_are_those_of_transformers(files: ModelFiles) -> None:
    source = files.open_weights()
    assert source is not None
    model = build_model(files.config)
    weights = load_weights(model, source, dtype="float32")
    answers = greedy(model, weights, [entry["prompt"] for entry in EXPECTED], len(EXPECTED[0]["generated"]))
    assert len(answers) >= 10
    for entry, answer in zip(EXPECTED, answers, strict=True):
        assert len(answer) == 32
        assert answer == entry["generated"], entry["text"]

    france = next(answer for entry, answer in zip(EXPECTED, answers, strict=True) if "France" in entry["text"])
    end = min(france.index(token_id) for token_id in files.eos_token_ids if token_id in france)
    assert load_tokenizer(files.tokenizer or "").decode(france[:end]) == "The capital of France is Paris."


def test_no_expected_token_is_a_matter_of_rounding() -> None:
    assert min(margin for entry in EXPECTED for margin in entry["margins"]) > 2 * ROUNDING


def test_its_prompts_are_those_of_transformers(files: ModelFiles) -> None:
    assert files.tokenizer is not None
    tokenizer = load_tokenizer(files.tokenizer)
    template = load_chat_templates(files.tokenizer, tokenizer.special_tokens).select()
    for entry in EXPECTED:
        text = entry["text"]
        if entry["chat"]:
            text = template.render([{"role": "user", "content": text}])
        assert tokenizer.encode(text, add_special_tokens=not entry["chat"]) == entry["prompt"]


def test_it_is_described_by_its_metadata(files: ModelFiles) -> None:
    assert (files.kind, files.name) == ("gguf", "smollm2-135m-instruct")
    tokens = read_metadata(files.path or "")["tokenizer.ggml.tokens"]
    assert [tokens[token_id] for token_id in files.eos_token_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert (files.config["max_position_embeddings"], files.config["tie_word_embeddings"]) == (8192, True)


@pytest.mark.parity
def test_transformers_still_gives_the_stored_answers(files: ModelFiles, reference: Any) -> None:
    """Each stored token is its choice after those before it, which makes the whole its greedy answer."""
    import torch

    assert files.path is not None
    prompts = prompt_token_ids(files.path)
    for entry in EXPECTED:
        assert prompts[entry["text"]] == entry["prompt"]
        known = entry["prompt"] + entry["generated"]
        with torch.no_grad():
            choices = reference(torch.tensor([known])).logits[0].argmax(-1).tolist()
        assert choices[len(entry["prompt"]) - 1 : -1] == entry["generated"], entry["text"]


@pytest.mark.parity
def test_its_logits_are_those_of_transformers(files: ModelFiles, reference: Any) -> None:
    import torch

    known = EXPECTED[0]["prompt"] + EXPECTED[0]["generated"]
    with torch.no_grad():
        expected = reference(torch.tensor([known])).logits[0].numpy()
    source = files.open_weights()
    assert source is not None
    model = build_model(files.config)
    logits = whole_logits(model, load_weights(model, source, dtype="float32"), known)
    assert np.abs(logits - expected).max() < ROUNDING
