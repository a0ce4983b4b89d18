"""Pages that are evicted go to the host, and come back when a prompt begins with them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.host_tier import HostPage, HostTier, prefix_digests
from quire.core.plan import StepPlan, StepResult, Tier
from quire.core.prefix_cache import Match, PrefixCursor
from quire.core.restores import Restores
from quire.request import Request
from tests.core.harness import GREEDY, Harness, limits, request
from tests.core.test_schedules import GROUPS, Schedules, Setup
from tests.fake_executor import expected_tokens

TALK = tuple(range(1, 25))  # 6 pages of 4
OTHER = tuple(range(25, 49))


def hosted(lookahead: int = 0, **changes: object) -> Harness:
    """A device that has room for one conversation of 28 tokens."""
    defaults = {"num_pages": 8, "host_pages": 40, "max_batch_size": 2, "max_batch_prefill_tokens": 14}
    return Harness(limits(**(defaults | changes)), lookahead)


def run(harness: Harness, request_id: int, prompt: tuple[int, ...], max_tokens: int = 3) -> list[StepPlan]:
    """The plans that answer it."""
    first = len(harness.executor.plans)
    asked = request(request_id, prompt, max_tokens, sampling=GREEDY)
    harness.add(asked)
    harness.run()
    assert harness.tokens[request_id, 0] == expected_tokens(asked)
    return harness.executor.plans[first:]


def num_restored(plans: list[StepPlan]) -> list[int]:
    return [sum(copy.source.tier is Tier.HOST for copy in plan.copies) for plan in plans]


def num_saved(plans: list[StepPlan]) -> int:
    return sum(copy.target.tier is Tier.HOST for plan in plans for copy in plan.copies)


def tier(harness: Harness) -> HostTier:
    found = harness.scheduler._running.host
    assert found is not None
    return found


def test_a_prefix_that_was_evicted_is_copied_and_not_computed():
    harness = hosted()
    run(harness, 1, TALK)
    assert num_saved(run(harness, 2, OTHER)) >= 5
    plans = run(harness, 3, (*TALK, 40))
    assert sum(num_restored(plans)) == 6
    assert harness.cached[3, 0] == 24
    assert sum(chunk.length for plan in plans for chunk in plan.chunks) == 1 + 2


def test_finding_pages_of_a_long_prompt_asks_for_few_of_them_twice():
    """Though the window of every end is missing."""
    num_pages, asked = 400, []

    class Host:
        def find(self, digest: bytes, group: int) -> HostPage | None:
            asked.append((digest, group))
            return None if group else HostPage((digest, group), 1)

    scheduler = Harness(limits(num_pages=500, max_sequence_tokens=2000)).scheduler
    scheduler.add(request(1, (1, 2, 3, 4) * num_pages + (5,), 1))
    (sequence,) = scheduler._requests.sequences(1)
    match = Match(PrefixCursor("", 0), [])
    assert Restores(Host(), 4, (None, 8)).find(sequence, match) is None
    assert len(asked) <= 3 * num_pages


def test_a_short_prefix_is_restored_in_the_step_that_computes_the_rest():
    harness = hosted()
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    first = run(harness, 3, (*TALK, 40))[0]
    assert num_restored([first]) == [6]
    assert (first.chunks[0].start, first.chunks[0].length) == (24, 1)
    assert len(first.chunks[0].new_pages[0]) == 7


def test_a_long_restore_is_spread_over_steps():
    harness = hosted(max_page_restores=2, num_pages=12)
    run(harness, 1, TALK)
    run(harness, 2, (*OTHER, *OTHER[:16]))
    harness.add(request(4, (45, 46), 12, sampling=GREEDY))
    harness.step()
    plans = run(harness, 3, (*TALK, 40))
    assert num_restored(plans)[:4] == [2, 2, 2, 0]
    assert [len(plan.chunks) for plan in plans[:3]] == [1, 1, 2], "the other decodes beside each of them"
    assert plans[2].chunks[1].start == 24
    assert harness.tokens[4, 0] == expected_tokens(request(4, (45, 46), 12, sampling=GREEDY))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_pages_come_a_step_before_they_are_read_if_others_would_wait_for_them(lookahead):
    harness = hosted(lookahead, restores_ahead=True, num_pages=12)
    run(harness, 1, TALK)
    run(harness, 2, (*OTHER, *OTHER[:16]))
    alone = run(harness, 3, (*TALK, 40))[0]
    assert (num_restored([alone]), [chunk.start for chunk in alone.chunks]) == ([6], [24])
    run(harness, 4, (*OTHER, *OTHER[:16]))
    harness.add(request(5, (45, 46), 12, sampling=GREEDY))
    harness.step()
    plans = run(harness, 6, (*TALK, 40))
    plans = plans[num_restored(plans).index(6) :]
    assert num_restored(plans)[:2] == [6, 0]
    assert [[chunk.request_id for chunk in plan.chunks] for plan in plans[:2]] == [[5], [5, 6]]
    assert plans[1].chunks[1].start == 24


@pytest.mark.parametrize("num_tokens", [60, 2])
def test_pages_come_a_step_before_they_are_read_beside_prompts_too(num_tokens):
    """A long prompt, and one that ends in the step."""
    harness = hosted(restores_ahead=True, num_pages=30)
    run(harness, 1, TALK)
    for request_id in range(10, 15):
        run(harness, request_id, tuple(range(30 * request_id, 30 * request_id + 26)))
    harness.add(request(5, tuple(range(600, 600 + num_tokens)), 2, sampling=GREEDY))
    plans = run(harness, 6, (*TALK, 40))
    assert num_restored(plans)[:2] == [6, 0]
    assert [sorted(chunk.request_id for chunk in plan.chunks) for plan in plans[:2]] == [[5], [5, 6]]


def test_fewer_pages_come_in_a_step_in_which_sequences_decode():
    harness = hosted(num_pages=12)
    harness.scheduler.budget.max_restores_beside_decodes = 2
    run(harness, 1, TALK)
    run(harness, 2, (*OTHER, *OTHER[:16]))
    assert num_restored(run(harness, 3, (*TALK, 40)))[0] == 6
    run(harness, 4, (*OTHER, *OTHER[:16]))
    harness.add(request(5, (45, 46), 12, sampling=GREEDY))
    harness.step()
    assert num_restored(run(harness, 6, (*TALK, 40)))[:3] == [2, 2, 2]


def test_those_that_restore_in_one_step_share_its_limit():
    harness = hosted(max_page_restores=3, num_pages=16)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    run(harness, 3, tuple(n % 47 for n in range(5, 62)))
    for request_id, prompt in ((4, TALK), (5, OTHER)):
        harness.add(request(request_id, (*prompt, 40), 3, sampling=GREEDY))
    first = len(harness.executor.plans)
    harness.run()
    assert num_restored(harness.executor.plans[first:])[:4] == [3, 3, 3, 3]
    assert harness.cached[4, 0] == harness.cached[5, 0] == 24


def test_a_page_that_is_on_the_host_is_not_copied_there_again():
    harness = hosted()
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    run(harness, 3, (*TALK, 40))
    before = tier(harness).num_saved
    run(harness, 4, OTHER)
    restored = run(harness, 5, (*TALK, 40))
    assert sum(num_restored(restored)) >= 5
    assert tier(harness).num_saved - before <= 4, "their last pages alone are new"
    assert tier(harness).num_lost == 0


def test_no_more_than_the_limit_is_saved_in_a_step():
    harness = hosted(max_page_saves=2)
    run(harness, 1, TALK)
    plans = run(harness, 2, OTHER)
    saved = [num_saved([plan]) for plan in plans]
    assert max(saved) == 2
    assert tier(harness).num_lost == harness.scheduler.stats().evicted_pages - sum(saved)


def test_the_host_forgets_what_was_not_used_for_longest():
    harness = hosted(host_pages=13)
    prompts = {n: tuple(range(n, n + 24)) for n in (1, 2, 3)}
    for n, prompt in prompts.items():
        run(harness, n, prompt)
    run(harness, 4, OTHER)
    assert sum(num_restored(run(harness, 5, (*prompts[3], 40)))) == 6
    assert sum(num_restored(run(harness, 6, (*prompts[1], 40)))) == 0


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning():
    harness = hosted(host_pages=4)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    assert harness.scheduler.stats().evicted_pages >= 5
    digests = prefix_digests("0+", TALK, 4, 6, [])
    known = [tier(harness).find(digest, 0) is not None for digest in digests]
    assert known == sorted(known, reverse=True)
    assert any(known)
    assert not all(known)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_pages_on_the_host_survive_a_lost_device(lookahead):
    harness = hosted(lookahead)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    harness.lose_everything()
    assert sum(num_restored(run(harness, 3, (*TALK, 40)))) == 6


@pytest.mark.parametrize("num_done", [0, 1])
def test_what_was_being_restored_when_a_step_failed_is_computed(num_done):
    """One of those pages may be what the step failed with. Those of earlier steps are restored again."""
    harness = hosted(max_page_restores=2)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    harness.add(request(3, (*TALK, 40), 3, sampling=GREEDY))
    for _ in range(num_done):
        harness.step()
    harness.plan()
    harness.lose_everything()
    first = len(harness.executor.plans)
    harness.run()
    assert sum(num_restored(harness.executor.plans[first:])) == 2 * num_done
    assert harness.tokens[3, 0] == expected_tokens(request(3, (*TALK, 40), 3, sampling=GREEDY))


def test_what_was_on_its_way_to_the_host_when_a_step_failed_is_not_there():
    harness = hosted()
    run(harness, 1, TALK)
    harness.add(request(2, OTHER, 1))
    assert num_saved([harness.plan()]) > 0
    harness.lose_everything()
    assert len(tier(harness)) == 0
    harness.run()


def test_what_was_lost_on_its_way_to_the_host_is_computed_and_counted():
    """The step has a result, and tells that copies have failed."""
    harness = hosted()
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    lost, before = tuple(one.page for one in tier(harness)._pages.values()), tier(harness).num_lost
    harness.add(request(3, (45, 46), 1))
    plan = harness.plan()
    harness.scheduler.complete(StepResult(plan.step, [[7]], lost_pages=lost))
    assert len(tier(harness)) == 0
    assert tier(harness).num_lost == before + len(lost)
    harness.scheduler.check()


def test_a_lost_page_that_is_written_anew_is_kept():
    """Its former contents were lost, and it was taken for others before that was known."""
    host = tier(hosted())
    written = host.reserve((b"another prefix", 0))
    host.lose([written.page])
    host.confirm([written])
    assert host.find(*written.key) is written
    assert host.num_lost == 0


def test_what_was_to_be_copied_to_the_host_when_the_device_was_lost_is_forgotten():
    harness = hosted()
    run(harness, 1, TALK)
    harness.scheduler._running.cache.evict(2)
    assert len(tier(harness)) == 2
    harness.lose_everything()
    assert len(tier(harness)) == 0
    assert num_saved(run(harness, 2, (45, 46))) == 0


def test_a_page_of_tokens_is_restored_in_all_groups_even_if_the_limit_is_lower():
    harness = hosted(page_groups=(None, None), num_pages=15, max_page_restores=1)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    assert num_restored(run(harness, 3, (*TALK, 40)))[:7] == [2, 2, 2, 2, 2, 2, 0]


def test_a_restore_that_is_aborted_lets_go_of_both_tiers():
    harness = hosted(lookahead=1, max_page_restores=2)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    harness.add(request(3, (*TALK, 40), 3))
    harness.plan()
    harness.plan()
    harness.abort(3)
    harness.run()
    assert harness.scheduler.stats().free_pages + harness.scheduler.stats().cached_pages == 7
    assert sum(num_restored(run(harness, 4, (*TALK, 40)))) >= 2


def test_what_was_restored_stays_on_the_device_when_its_sequence_is_aborted():
    harness = hosted(max_page_restores=2)
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    harness.add(request(3, (*TALK, 40), 3))
    harness.step()
    harness.abort(3)
    assert harness.scheduler._running.cache.match("0+", TALK, 24).cursor.num_pages == 2
    harness.run()


def test_pages_are_shared_as_soon_as_they_are_restored():
    harness = hosted(max_page_restores=2, num_pages=14)
    run(harness, 1, TALK)
    run(harness, 2, (*OTHER, *OTHER[::-1]))
    harness.add(request(3, (*TALK, 40), 3))
    harness.add(request(4, (*TALK[:8], 41, 42), 3))
    first = len(harness.executor.plans)
    harness.step()
    harness.step()
    one, two = harness.executor.plans[first:]
    assert not one.chunks, "the other waits for the pages that it needs"
    assert [(chunk.request_id, chunk.start) for chunk in two.chunks] == [(4, 8)]
    harness.run()


def test_two_with_one_prefix_restore_it_once():
    harness = hosted(max_page_restores=2, num_pages=14)
    run(harness, 1, TALK)
    run(harness, 2, (*OTHER, *OTHER[::-1]))
    for request_id in (3, 4):
        harness.add(request(request_id, (*TALK, 40 + request_id), 3, sampling=GREEDY))
    first = len(harness.executor.plans)
    harness.run()
    assert sum(num_restored(harness.executor.plans[first:])) == 6
    assert harness.cached[3, 0] == harness.cached[4, 0] == 24


def with_windows_on_the_host(**changes: object) -> Harness:
    """The full pages of a conversation are on the device; those of a window, which can be evicted alone, are not."""
    harness = hosted(page_groups=(None, 8), num_pages=18, **changes)
    run(harness, 1, TALK, 1)
    cache = harness.scheduler._running.cache
    for node in [node for root in cache._roots.values() for node in root.below()]:
        tier(harness).save(node, (1,))
        cache._pool.release([cache._drop_page(node, 1)])
    run(harness, 3, (47,), 1)  # whose step saves them
    return harness


def test_a_window_is_restored_where_the_full_pages_are_still_on_the_device():
    harness = with_windows_on_the_host()
    plans = run(harness, 2, (*TALK, 40), 1)
    assert num_restored(plans)[0] == 2, "those before position 24 that a window of 8 reads"
    assert harness.cached[2, 0] == 24


def test_a_prefix_is_restored_up_to_where_a_window_has_a_hole():
    harness = with_windows_on_the_host()
    missing = tier(harness).find(prefix_digests("0+", TALK, 4, 6, [])[4], 1)
    assert missing is not None
    tier(harness).distrust([missing])
    run(harness, 2, (*TALK, 40), 1)
    assert harness.cached[2, 0] == 16


def test_a_restore_that_is_aborted_lets_go_of_the_pages_that_were_on_the_device():
    harness = with_windows_on_the_host(max_page_restores=1)
    harness.add(request(2, (*TALK, 40), 1))
    assert num_restored([harness.plan()]) == [1]
    harness.abort(2)
    harness.run()


def test_salts_are_kept_apart_on_the_host():
    harness = hosted()
    run(harness, 1, TALK)
    run(harness, 2, OTHER)
    harness.add(request(3, (*TALK, 40), 1, salt="another"))
    first = len(harness.executor.plans)
    harness.run()
    assert sum(num_restored(harness.executor.plans[first:])) == 0


def test_a_page_from_elsewhere_is_restored_like_one_that_was_saved():
    source = hosted()
    run(source, 1, TALK)
    run(source, 2, OTHER)
    harness = hosted()
    for digest in prefix_digests("0+", TALK, 4, 6, []):
        page = tier(source).find(digest, 0)
        reserved = tier(harness).reserve((digest, 0))
        assert reserved is not None
        assert tier(harness).find(digest, 0) is None, "before it is confirmed"
        assert tier(harness).reserve((digest, 0)) is None, "it is reserved"
        harness.executor.host_pages._pages[reserved.page] = [
            None if one is None else (*one[:3], 0) for one in source.executor.host_pages._pages[page.page]
        ]
        tier(harness).confirm([reserved])
    harness.scheduler.check()
    assert sum(num_restored(run(harness, 3, (*TALK, 40)))) == 6


@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from(GROUPS),
    lookahead=st.integers(0, 2),
    host_pages=st.sampled_from([200, 30, 4]),
    restores=st.sampled_from([16, 1, 3]),
    guesses=st.sampled_from([0, 0, 3]),
)
def test_conversations_that_do_not_fit_the_device_go_on_with_the_same_tokens(
    seed, groups, lookahead, host_pages, restores, guesses
):
    """Turns of a few conversations in any order, with aborts and lost devices between them."""
    chance, machine = random.Random(seed), Schedules()
    pages = chance.choice([14, 20]) * len(groups)
    chosen = limits(
        num_pages=pages, host_pages=host_pages, max_page_restores=restores, page_groups=groups, max_guesses=guesses,
        max_batch_size=3, max_batch_prefill_tokens=chance.choice([3, 8, 16]), max_page_saves=chance.choice([64, 64, 5]),
    )  # fmt: skip
    machine.start(Setup(chosen, lookahead))
    talks = [[n, *(chance.randrange(2) for _ in range(8))] for n in range(4)]
    for _ in range(chance.randrange(6, 30)):
        talk = chance.choice(talks)
        if len(talk) > 40:
            del talk[9:]
        asked = Request(len(machine.asked) + 1, tuple(talk), chance.choice([1, 4]), seed=1, sampling=GREEDY)
        machine._add(asked)
        talk += [*expected_tokens(asked), chance.randrange(48)]
        for _ in range(chance.choice([0, 2, 8, 60])):
            machine.harness.step()
        if chance.random() < 0.1:
            machine.harness.abort(asked.request_id)
            machine.aborted.add(asked.request_id)
        if chance.random() < 0.05:
            machine.harness.plan()
            machine.harness.lose_everything()
    machine.teardown()
