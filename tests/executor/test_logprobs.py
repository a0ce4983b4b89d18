"""Log-probabilities of prompts and answers against the plain forward, and against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.plan import TokenLogprobs
from quire.files.model_files import locate
from quire.request import Request, SamplingParams
from tests.executor.rig import FEW_SHAPES, Answer, Rig, config_of, quickly_compiled
from tests.executor.sampling_reference import log_softmax
from tests.executor.workload import workload

Array = np.ndarray[Any, Any]
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"prefix_caching": False, "lookahead": 0},
    "chunks of 1": {"max_batch_prefill_tokens": 1},
    "chunks of 7": {"max_batch_prefill_tokens": 7},
    "preempted": {"num_pages": 46, "max_batch_prefill_tokens": 24, "lookahead": 2},
}


def check_row(got: TokenLogprobs, logits: Array, token: int, top: int) -> None:
    expected = log_softmax(logits)
    assert len(got.top_ids) == len(got.top_logprobs) == top
    np.testing.assert_allclose(got.logprob, expected[token], atol=2e-4)
    np.testing.assert_allclose(got.top_logprobs, np.sort(expected)[::-1][:top], atol=2e-4)
    np.testing.assert_allclose(got.top_logprobs, expected[list(got.top_ids)], atol=2e-4)


def check_answer(request: Request, answer: Answer, logits: Array) -> None:
    """`logits` follow each token of the prompt and the answer."""
    known = [*request.prompt, *answer.tokens]
    num_prompt = len(request.prompt)
    if request.prompt_logprobs is not None:
        assert len(answer.prompt_logprobs) == num_prompt - 1
        for position, got in enumerate(answer.prompt_logprobs):
            check_row(got, logits[position], known[position + 1], request.prompt_logprobs)
    if request.sampling.logprobs is not None:
        assert len(answer.logprobs) == len(answer.tokens)
        for position, got in enumerate(answer.logprobs, start=num_prompt - 1):
            check_row(got, logits[position], known[position + 1], request.sampling.logprobs)


def scored(rig: Rig, count: int, all_prompts: bool) -> list[Request]:
    """Some with log-probabilities of the prompt, some of the answer, some of both, some of none."""
    requests = []
    for r in workload(rig, count, seed=70):
        top = (None, 0, 3, 20)[r.request_id % 4]
        sampling = SamplingParams(temperature=0.9, top_k=50, logprobs=top)
        prompt_top = 1 if all_prompts else (None, 0, 5, 20, None)[r.request_id % 5]
        max_tokens = 0 if r.request_id % 7 == 3 else 18
        requests.append(Request(r.request_id, r.prompt, max_tokens, sampling, seed=3, prompt_logprobs=prompt_top))
    return requests


@pytest.mark.parametrize("name", SCHEDULES)
def test_logprobs_are_those_of_the_plain_forward(any_llama: Rig, name: str) -> None:
    requests = scored(any_llama, 20, all_prompts=name == "preempted")
    run = any_llama.run(requests, **SCHEDULES[name])
    assert (run.engine.scheduler.counters.preemptions > 0) == (name == "preempted")
    for request in requests:
        answer = run.answers[request.request_id, 0]
        assert len(answer.tokens) == request.max_tokens
        check_answer(request, answer, any_llama.logits([*request.prompt, *answer.tokens], len(request.prompt)))


def test_a_prompt_in_the_cache_is_computed_again_when_its_logprobs_are_asked_for(llama: Rig) -> None:
    prompt = tuple(workload(llama, 40, seed=71)[5].prompt * 30)[:90]
    sampling = SamplingParams(temperature=0)
    requests = [
        Request(0, prompt, 2, sampling),
        Request(1, prompt, 2, sampling),
        Request(2, prompt, 2, sampling, prompt_logprobs=1),
    ]
    run = llama.run(requests, max_batch_size=1)
    assert run.answers[1, 0].cached_tokens > 0
    assert run.answers[2, 0].cached_tokens == 0
    assert run.answers[0, 0].tokens == run.answers[2, 0].tokens
    check_answer(requests[2], run.answers[2, 0], llama.logits([*prompt, *run.answers[2, 0].tokens], len(prompt)))


@pytest.mark.parity
def test_logprobs_and_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {key: value for key, value in config_of("llama").items() if key != "model_type"}
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / min(parameter.shape) ** 0.5)
    theirs.save_pretrained(tmp_path)
    files = locate(str(tmp_path))
    with quickly_compiled():
        rig = Rig(files.config, FEW_SHAPES, files.open_weights())
    requests = [
        Request(r.request_id, r.prompt, 12, SamplingParams(temperature=0, logprobs=5), prompt_logprobs=5)
        for r in workload(rig, 8, seed=72)
    ]
    run = rig.run(requests)
    for request in requests:
        answer = run.answers[request.request_id, 0]
        ids = torch.tensor([[*request.prompt, *answer.tokens]])
        with torch.no_grad():
            logits = theirs(ids).logits[0].numpy()
        check_answer(request, answer, logits)
        behind = logits.max(axis=-1) - logits[np.arange(len(logits)), np.append(ids[0, 1:], 0)]
        assert behind[len(request.prompt) - 1 : -1].max() < 1e-3
