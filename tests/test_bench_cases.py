"""The loads of `quire bench offline` are what their names say."""

import pytest

from quire.cli.bench import scenarios
from quire.cli.bench.offline import case
from quire.errors import InvalidSetting


@pytest.mark.parametrize("name", [name for name in scenarios.NAMES if name != "start"])
def test_every_case_that_is_named_can_be_measured(name: str) -> None:
    assert callable(case(name))


@pytest.mark.parametrize("name", ["long_16x", "shared_0x10", "mix", "nano257", "mix1000x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        case(name)


def load(name: str) -> scenarios.Work:
    return scenarios.load(name)(1000)


def test_those_that_are_compared_with_others_have_their_lengths() -> None:
    lengths = {
        name: ({len(prompt) for prompt in load(name).prompts}, set(load(name).new_tokens), len(load(name).prompts))
        for name in ("decode_b8", "prefill_64x2048", "ttft_512")
    }
    assert lengths == {
        "decode_b8": ({128}, {257}, 8),
        "prefill_64x2048": ({2048}, {1}, 64),
        "ttft_512": ({512}, {1}, 1),
    }


def test_long_contexts_differ_from_the_first_token_on() -> None:
    work = load("long_3x50")
    assert [len(prompt) for prompt in work.prompts] == [50] * 3
    assert len({tuple(prompt[:8]) for prompt in work.prompts}) == 3
    assert work.new_tokens == [256] * 3


def test_prompts_share_their_beginning_and_nothing_more() -> None:
    work = load("shared_5x40")
    assert len({tuple(prompt[:40]) for prompt in work.prompts}) == 1
    assert len({tuple(prompt[40:]) for prompt in work.prompts}) == 5
    assert {len(prompt) for prompt in work.prompts} == {104}


def test_a_mix_has_short_and_long_prompts_and_answers() -> None:
    work = load("mix200")
    lengths = [len(prompt) for prompt in work.prompts]
    for values, lowest, highest in ((lengths, 16, 4096), (work.new_tokens, 16, 1024)):
        assert lowest <= min(values) < 2 * lowest
        assert highest / 2 < max(values) <= highest
        middle = (lowest * highest) ** 0.5
        assert 70 < sum(value < middle for value in values) < 130
