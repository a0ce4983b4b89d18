"""`LLM` with guesses by a second model gives the answers that it gives without."""

from typing import Any

import pytest

from quire import LLM, SamplingParams, regex
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model

PROMPTS = ["abcabcabcabcab", "the cat the cat the"]
SAMPLED = SamplingParams(temperature=0.6, top_k=3)

pytestmark = pytest.mark.usefixtures("patient_masks")


def answers(llm: LLM) -> list[Any]:
    ways: list[dict[str, Any]] = [{"n": 2}, {"stop": ["a", "e"]}, {"grammar": regex("[ab]{5,9}")}]
    done = [one for way in ways for one in llm.generate(PROMPTS, SAMPLED, max_tokens=24, seed=7, **way)]
    return [(one.text, one.finish_reason, one.error) for one in done]


def test_answers_are_the_same_and_the_draft_guesses_right(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    model, draft = write_tiny_chat_model(folder / "model"), write_tiny_chat_model(folder / "draft")
    settings: dict[str, Any] = {**SIZES, "cache_dir": program_folder(tmp_path_factory), "compile_ahead": False}
    plain = LLM(model, progress=False, **settings)
    drafted = LLM(model, progress=False, speculate=3, draft_model=draft, **settings)
    assert answers(drafted) == answers(plain)
    counters = drafted.engine.scheduler.counters
    assert counters.right_guesses == counters.guesses > 10  # it has the same weights
