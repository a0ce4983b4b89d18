"""The choice of an engine for a request: the rule, and its results over traces."""

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.service.routing import BLOCK_TOKENS, MAX_BLOCKS, EngineRouter, KnownBlocks, blocks_of, most_load
from tests.server.routing_traces import TRACES, Workers, by_chance, least_loaded, play

MOST_UNEVEN = 1.5  # mean over arrivals of the sequences of the fullest engine, in units of the average

prompts = st.lists(st.sampled_from([(1,) * 64, (2,) * 64, (3,) * 64, (4,) * 20]), min_size=1, max_size=6).map(
    lambda parts: sum(parts, ())
)


def prompt_of(*blocks: int) -> tuple[int, ...]:
    return tuple(token for block in blocks for token in [block] * BLOCK_TOKENS)


@given(prompts, prompts)
def test_prompts_have_as_many_blocks_in_common_as_they_begin_alike(one, other):
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    if len(one) < BLOCK_TOKENS or len(other) < BLOCK_TOKENS:
        return  # a short prompt is one block of its own
    pairs = list(zip(blocks_of(one, ""), blocks_of(other, ""), strict=False))
    assert [a == b for a, b in pairs] == [index < common // BLOCK_TOKENS for index in range(len(pairs))]


def test_salts_keep_equal_prompts_apart():
    assert not set(blocks_of(prompt_of(1, 2, 3), "a")) & set(blocks_of(prompt_of(1, 2, 3), "b"))


def test_the_work_on_a_prompt_is_bounded():
    assert len(blocks_of((7,) * 1_000_000, "")) == MAX_BLOCKS


def test_blocks_are_the_same_in_every_process():
    """Also with a salt: hashes of texts are not."""
    command = "from quire.server.service.routing import blocks_of; print(list(blocks_of((1, 2) * 100, 'salt')))"
    told = {subprocess.check_output([sys.executable, "-c", command], text=True) for _ in range(2)}
    assert told == {f"{list(blocks_of((1, 2) * 100, 'salt'))}\n"}


@given(st.lists(prompts, max_size=40), prompts, st.integers(0, 8))
def test_an_engine_knows_the_prompts_that_were_used_last(used, asked, max_blocks):
    """Compared with a list of all blocks in the order in which they were last used."""
    known, order = KnownBlocks(max_blocks), []
    for prompt in used:
        blocks = list(blocks_of(prompt, ""))
        known.use(blocks)
        order = [block for block in order if block not in blocks] + blocks[::-1]
        order = order[max(0, len(order) - max_blocks) :]
        assert len(known) == len(order)
    blocks = blocks_of(asked, "")
    leading = next((index for index, block in enumerate(blocks) if block not in order), len(blocks))
    assert known.num_known(blocks) == leading


def sent(num_engines: int, *prompts: tuple[int, tuple[int, ...]]) -> EngineRouter:
    router = EngineRouter(num_engines)
    for engine, prompt in prompts:
        router.sent(engine, blocks_of(prompt, ""))
    return router


def test_the_longest_prefix_wins():
    router = sent(3, (0, prompt_of(1)), (1, prompt_of(1, 2, 3)), (2, prompt_of(1, 2)))
    assert router.choose(blocks_of(prompt_of(1, 2, 3, 4), ""), [0.0, 0.0, 0.0]) == 1
    assert router.choose(blocks_of(prompt_of(1, 2, 9), ""), [0.0, 0.0, 1.0]) == 1  # both have two blocks
    assert router.choose(blocks_of(prompt_of(1, 2, 3, 4), ""), [0.0, None, 0.0]) == 2


def test_a_prefix_is_worth_as_many_sequences_as_it_has_blocks():
    router = sent(2, (0, prompt_of(1, 2, 3)))
    asked = blocks_of(prompt_of(1, 2, 3, 4), "")
    assert router.choose(asked, [2.9, 0.0]) == 0
    assert router.choose(asked, [3.1, 0.0]) == 1


def test_no_prefix_is_long_enough_for_an_engine_that_is_much_busier():
    router = sent(2, (0, prompt_of(*range(100))))
    asked = blocks_of(prompt_of(*range(100)), "")
    assert router.choose(asked, [most_load(20.0), 20.0]) == 0
    assert router.choose(asked, [most_load(20.0) + 0.1, 20.0]) == 1


def test_an_engine_that_started_again_has_nothing():
    router = sent(2, (0, prompt_of(1, 2, 3)))
    router.started(0, 1000)
    assert router.num_known(0, blocks_of(prompt_of(1, 2, 3), "")) == 0


def test_an_engine_is_taken_to_forget_what_its_cache_has_no_room_for():
    router = EngineRouter(2)
    router.started(0, max_blocks=4)
    for family in range(10):
        router.sent(0, blocks_of(prompt_of(family, family, family), ""))
    assert [router.num_known(0, blocks_of(prompt_of(family, family, family), "")) for family in (0, 8, 9)] == [0, 1, 3]


def test_workers_that_know_nothing_of_each_other_choose_alike():
    system = prompt_of(1, 2, 3)
    workers = [sent(4, (0, system), (1, system), (2, system), (3, system)) for _ in range(2)]
    for question in range(50):
        blocks = blocks_of((*system, *prompt_of(100 + question)), "")
        one, other = (worker.choose(blocks, [20.0, 20.5, 21.0, 21.5]) for worker in workers)
        assert one == other


loads = st.lists(st.none() | st.floats(0, 1000), min_size=1, max_size=8).filter(
    lambda found: any(load is not None for load in found)
)


@given(loads, st.lists(st.tuples(st.integers(0, 7), prompts), max_size=20), prompts)
def test_the_chosen_engine_takes_requests_and_is_not_much_busier_than_any(loads, before, asked):
    router = EngineRouter(len(loads))
    for engine, prompt in before:
        router.sent(engine % len(loads), blocks_of(prompt, ""))
    chosen = loads[router.choose(blocks_of(asked, ""), loads)]
    assert chosen is not None
    assert chosen <= most_load(min(load for load in loads if load is not None))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=8), prompts, st.integers(0, 7))
def test_the_choice_is_a_function_of_what_was_sent_and_the_loads(loads, asked, engine):
    def choose() -> int:
        router = sent(len(loads), (engine % len(loads), asked))
        return router.choose(blocks_of(asked, ""), loads)

    assert choose() == choose()


@pytest.mark.parametrize("name", TRACES)
def test_more_is_found_in_caches_than_by_chance_or_by_load_and_no_engine_has_much_more_than_its_share(name):
    trace = TRACES[name](random.Random(name).randrange(1000))
    ours, chance, least = play(trace, Workers(4)), play(trace, by_chance(1)), play(trace, least_loaded)
    better = {"chats": 0.15, "documents": 0.15, "mixed": 0.15, "unrelated": 0.0, "one crowd": -0.01}[name]
    assert ours.hit_rate >= max(chance.hit_rate, least.hit_rate) + better
    assert ours.balance <= MOST_UNEVEN
    assert ours.balance <= least.balance + 0.25


def test_workers_that_hear_of_each_other_find_as_much_as_one():
    trace = TRACES["chats"](3)
    alone, together = play(trace, Workers(4)), play(trace, Workers(4, num_workers=4, delay=5))
    without = play(trace, Workers(4, num_workers=4, delay=len(trace)))
    assert together.hit_rate >= alone.hit_rate - 0.05
    assert without.hit_rate < together.hit_rate
