"""Plans handed to an executor without a scheduler: masks, and rows that fail alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, SlotStart
from quire.executor.executor import JaxExecutor
from quire.executor.sample.sampler import NOTHING_LEFT, Features
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from quire.request import SamplingParams
from tests.executor.rig import FEW_SHAPES, Rig, config_of, executor_of, quickly_compiled
from tests.executor.sampling import slot_start
from tests.executor.workload import GREEDY
from tests.fake_executor import plan_of
from tests.models.tiny import NamedTensors

PROMPTS = [(5, 6, 7), (8,), tuple(range(50, 90)), (9, 10)]


def start_of(slot: int, sampling: SamplingParams = GREEDY) -> SlotStart:
    return slot_start(sampling, slot=slot, prompt=PROMPTS[slot])


def fill(slot: int, page_size: int, samples: bool = True) -> Chunk:
    """The whole prompt of a slot, in pages of its own."""
    prompt = PROMPTS[slot]
    pages = tuple(1 + 20 * slot + number for number in range(-(-len(prompt) // page_size)))
    return Chunk(slot, 0, 0, slot, Kind.PREFILL, 0, len(prompt), (pages,), samples)


def mask_of(allowed: list[int], vocab_size: int) -> bytes:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_masks_restrict_the_chunks_they_are_given_for(llama: Rig) -> None:
    llama.executor.reset()
    page_size, vocab_size = llama.shapes.page_size, llama.model.vocab_size
    free = [int(llama.logits(prompt, len(prompt))[-1].argmax()) for prompt in PROMPTS]
    allowed = {1: [free[1]], 2: [3, 4, 290]}
    masks = {index: mask_of(tokens, vocab_size) for index, tokens in allowed.items()} | {3: mask_of([], vocab_size)}
    chunks = tuple(fill(slot, page_size) for slot in range(4))
    plan = plan_of(1, chunks, started=tuple(start_of(slot) for slot in range(4)), guided=tuple(masks))
    pending = llama.executor.submit(plan)
    assert all(launched.sampled is None for launched in pending.launched), "it waits for its masks"
    pending.sample(masks)
    result = pending.result()
    tokens = [row[0] if row else NOTHING_LEFT for row in result.tokens]
    logits = llama.logits(PROMPTS[2], len(PROMPTS[2]))[-1]
    assert tokens[:3] == [free[0], free[1], max(allowed[2], key=lambda token: logits[token])]
    assert list(result.failed) == [3]
    assert result.tokens[3] == []
    assert "no token can be sampled" in result.failed[3]
    # In the next step, of decodes, there is no mask unless it is given again, not even where one could have been.
    known = [(*prompt, token) for prompt, token in zip(PROMPTS, tokens, strict=True)]
    free = [int(llama.logits(row, len(row) - 1)[-1].argmax()) for row in known]
    decodes = tuple(Chunk(slot, 0, 0, slot, Kind.DECODE, len(PROMPTS[slot]), 1, (), True) for slot in (0, 1, 3))
    new_page = decodes[0]._replace(slot=2, request_id=2, start=len(PROMPTS[2]), new_pages=((99,),))
    pending = llama.executor.submit(plan_of(2, (decodes[0], decodes[1], new_page), guided=(1, 2)))
    pending.sample({1: mask_of([7], vocab_size)})
    result = pending.result()
    assert result.tokens == [[free[0]], [7], [free[2]]]
    assert not result.failed
    assert llama.executor.programs.num_late == 0


ASKS: dict[str, tuple[SamplingParams, int]] = {  # sampling and min_tokens, by the feature they need
    "filters": (SamplingParams(top_p=0.5), 0),
    "penalties": (SamplingParams(temperature=0, frequency_penalty=0.1), 0),
    "adjustments": (SamplingParams(temperature=0), 2),
    "logprobs": (SamplingParams(logprobs=0), 0),
}


@pytest.mark.parametrize("asked", ["nothing", *ASKS])
def test_a_step_is_told_of_a_feature_only_when_a_row_asks_for_it(llama: Rig, asked: str) -> None:
    """Greedy and plain rows ask for none, and a greedy row has no use for filters."""
    llama.executor.reset()
    sampling, min_tokens = ASKS.get(asked, (SamplingParams(), 0))
    starts = (
        start_of(0, SamplingParams(temperature=0, top_p=0.5)),
        start_of(1, sampling)._replace(min_tokens=min_tokens, end_ids=(3,)),
    )
    plan = plan_of(1, (fill(0, llama.shapes.page_size), fill(1, llama.shapes.page_size)), started=starts)
    pending = llama.executor.submit(plan)
    pending.result()
    (launched,) = pending.launched
    assert launched.features == Features(*(name == asked for name in Features._fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_may_be_computed_in_chunks_of_any_lengths(any_llama: Rig, seed: int) -> None:
    """Single tokens among them, which may begin a page that longer chunks go on from."""
    rng = np.random.default_rng(seed)
    page_size, prompt = any_llama.shapes.page_size, tuple(rng.integers(0, 300, 60).tolist())
    pages = rng.permutation(np.arange(1, 60)).tolist()
    any_llama.executor.reset()
    position = num_pages = step = 0
    result = None
    while position < len(prompt):
        length = min(int(rng.choice([1, 1, 2, 3, 17])), len(prompt) - position)
        end = position + length
        needed = -(-end // page_size)
        new_pages = (tuple(pages[num_pages:needed]),) if needed > num_pages else ()
        chunk = Chunk(7, 0, 0, 3, Kind.PREFILL, position, length, new_pages, end == len(prompt))
        started = (slot_start(GREEDY, slot=3, prompt=prompt),) if not step else ()
        step += 1
        result = any_llama.executor.submit(plan_of(step, (chunk,), started=started)).result()
        position, num_pages = end, needed
    assert result is not None
    assert result.tokens == [[int(any_llama.logits(prompt, len(prompt))[-1].argmax())]]
    assert not result.failed


@pytest.fixture(scope="module")
def poisoned() -> JaxExecutor:
    """A model whose token 9 is not a number. Its programs are compiled as they are needed."""
    model = build_model(config_of("llama", num_hidden_layers=1))
    weights: Any = load_weights(model, NamedTensors(model), dtype="float32")
    weights["embedding"] = jax.tree.map(lambda array: array.at[9].set(jnp.nan), weights["embedding"])
    return executor_of(model, weights, FEW_SHAPES)


@pytest.mark.parametrize("samples", [True, False])
def test_a_row_whose_logits_are_not_numbers_fails_alone(poisoned: JaxExecutor, samples: bool) -> None:
    """Also where it does not sample: its pages would be shared."""
    poisoned.reset()
    page_size = FEW_SHAPES.page_size
    both = (fill(3, page_size, samples), fill(0, page_size))
    starts = start_of(3), start_of(0, SamplingParams(temperature=0, logprobs=2))
    with quickly_compiled():
        result = poisoned.submit(plan_of(1, both, started=starts)).result()
        poisoned.reset()
        alone = poisoned.submit(plan_of(1, both[1:], started=starts[1:])).result()
    assert list(result.failed) == [0]
    assert "not finite" in result.failed[0]
    assert not alone.failed
    assert result.tokens[-1] == alone.tokens[0]
    assert len(result.tokens) == 1 + samples
    np.testing.assert_allclose(result.logprobs[1][0].logprob, alone.logprobs[0][0].logprob, atol=1e-4)
