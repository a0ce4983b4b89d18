"""Completions and their pieces say how many tokens they are about, and how fast they came."""

import pytest

from quire.ipc.messages import Update
from quire.llm.completion import CompletionBuilder
from quire.request import FinishReason


def test_an_answer_counts_its_tokens_and_how_fast_they_came() -> None:
    """The first tokens end the wait for the prompt, and do not count for the speed."""
    now = [100.0]
    answer = CompletionBuilder((1, 2, 3, 4, 5), None, (), continues=True, clock=lambda: now[0])
    pieces = [([], None), ([7, 8], None), ([9], None), ([10, 11], FinishReason.LENGTH)]
    speeds = []
    for index, (tokens, finish) in enumerate(pieces):
        now[0] += 0.5
        delta = answer.apply(3, Update(1, 0, tokens, finish, 4, None, None))
        assert (delta.prompt_tokens, delta.cached_tokens) == (5, 4)
        assert delta.generated_tokens == (0, 2, 3, 5)[index]
        speeds.append(delta.tokens_per_s)
    assert speeds == [None, None, pytest.approx(2.0), pytest.approx(3.0)]
    done = answer.completion
    assert (done.prompt_tokens, done.cached_tokens, done.generated_tokens) == (5, 4, 5)
    assert done.tokens_per_s == pytest.approx(3.0)


def test_an_answer_that_came_at_once_has_no_speed() -> None:
    answer = CompletionBuilder((1,), None, (), continues=True, clock=lambda: 5.0)
    answer.apply(0, Update(1, 0, [7], None, 0, None, None))
    answer.apply(0, Update(1, 0, [7], FinishReason.LENGTH, 0, None, None))
    assert answer.completion.generated_tokens == 2
    assert answer.completion.tokens_per_s is None
