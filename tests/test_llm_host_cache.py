"""`LLM` with host memory behind its cache gives the answers that it gives without."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model

GREEDY = SamplingParams(temperature=0)


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Of each prompt, one after the other, and again, when the others have taken its pages."""
    said = []
    for prompt in prompts + prompts:
        (done,) = llm.generate([prompt], GREEDY, max_tokens=4, ignore_end=True)
        assert done.error is None
        said.append(tuple(done.token_ids))
    return said


def test_answers_are_the_same_and_pages_come_back_from_the_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_chat_model(tmp_path_factory.mktemp("models"))
    longest = 96
    few = {"page_size": 8, "num_pages": longest // 8 + 2, "max_total_tokens": longest, "max_batch_size": 2}
    settings: dict[str, Any] = {**SIZES, **few, "cache_dir": program_folder(tmp_path_factory), "compile_ahead": False}
    prompts = [[5 + (n * number) % 40 for n in range(80)] for number in (1, 3, 7)]
    plain = LLM(model, progress=False, **settings)
    hosted = LLM(model, progress=False, host_cache_gib=0.05, **settings)
    expected = answers(plain, prompts)
    assert expected[:3] == expected[3:]
    assert answers(hosted, prompts) == expected
    assert plain.engine.scheduler.stats().restored_pages == 0
    assert hosted.engine.scheduler.stats().restored_pages > 15
