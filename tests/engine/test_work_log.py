"""The engine's line in the log: one for every ten seconds of work, none while there is none."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_engine_metrics import STEP_S, Engine

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)  # two pages of four tokens, and one more


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(vars(record))

    log, handler = logging.getLogger("quire.engine.work_log"), Keeping()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_line_comes_after_ten_seconds_of_work_with_the_numbers_of_these(lines):
    engine = Engine(lookahead=0)
    engine.ask(1, prompt=PROMPT, max_tokens=30)
    for _ in range(9):
        engine.turn()
    assert not lines
    engine.turn()
    (line,) = lines
    assert (line["levelname"], line["msg"]) == ("INFO", "engine")
    assert (line["running"], line["waiting"]) == (1, 0)
    assert line["prefill_tokens_per_s"] == len(PROMPT) / 10
    assert line["decode_tokens_per_s"] == 9 / 10
    assert line["step_ms"] == STEP_S * 1000
    assert line["pages_used_percent"] == round(100 * 5 / 99, 1)
    assert line["prefix_hit_percent"] == 0
    engine.run()
    assert len(lines) == 3
    assert lines[1]["prefill_tokens_per_s"] == 0
    assert lines[1]["decode_tokens_per_s"] == 1
    assert "prefix_hit_percent" not in lines[1]  # no prompt was computed


def test_prompts_found_in_the_cache_are_told(lines):
    engine = Engine(lookahead=0)
    engine.ask(1, prompt=PROMPT, max_tokens=3)
    engine.run()
    engine.ask(2, prompt=PROMPT, max_tokens=10)
    engine.run()
    assert lines[0]["prefix_hit_percent"] == round(100 * 8 / (9 + 9), 1)


def test_time_without_work_brings_no_line_and_does_not_count(lines):
    engine = Engine(lookahead=0)
    for count in range(1, 5):
        engine.ask(count, max_tokens=4)
        engine.run()
        engine.now += 1000.0
    assert len(lines) == 1  # for 16 steps of a second
    assert lines[0]["step_ms"] == STEP_S * 1000


def test_without_info_nothing_is_written(lines):
    logging.getLogger("quire.engine.work_log").setLevel(logging.WARNING)
    engine = Engine(lookahead=0)
    engine.ask(1, max_tokens=30)
    engine.run()
    assert not lines
