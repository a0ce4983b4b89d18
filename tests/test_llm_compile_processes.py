"""Engines whose programs are made by other processes: the same tokens, and threads where nothing can be kept."""

import logging
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.files.cache_folder import cache_folder
from tests.tiny_chat_model import SIZES, write_tiny_chat_model

PROMPTS = ["hello", "a longer prompt, of more than one step", "b"]
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]
MADE_BY_PROCESSES = "a process made"


def answers(model: str, cache: Path, compile_processes: int) -> list[tuple[int, ...]]:
    llm = LLM(model, progress=False, cache_dir=cache, compile_processes=compile_processes, **SIZES)
    try:
        found = [llm.generate(PROMPTS, sampling, max_tokens=6, seed=5) for sampling in SAMPLINGS]
        assert llm.engine.executor.num_late == 0
        return [tuple(one.token_ids) for completions in found for one in completions]
    finally:
        llm.close()


def test_tokens_do_not_depend_on_where_programs_are_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    model = write_tiny_chat_model(tmp_path / "model")
    found = []
    for count in (0, 1):
        cache = tmp_path / f"cache-{count}"
        cache.mkdir()
        (cache / "native").symlink_to(cache_folder() / "native")
        assert MADE_BY_PROCESSES not in caplog.text
        found.append(answers(model, cache, count))
    assert found[0] == found[1]
    assert MADE_BY_PROCESSES in caplog.text


def test_threads_compile_where_nothing_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    model = write_tiny_chat_model(tmp_path / "model")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "native").symlink_to(cache_folder() / "native")
    (cache / "programs").write_text("no folder")
    assert len(answers(model, cache, 1)) == len(PROMPTS) * len(SAMPLINGS)
    assert MADE_BY_PROCESSES not in caplog.text
    assert "compiled" in caplog.text
