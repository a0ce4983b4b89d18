"""Applies the results of steps to sequences."""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from quire.core.plan import NO_TOKEN_LEFT, Chunk, Failure, Guesses, Kind, StepPlan, StepResult, TokenLogprobs, Update
from quire.core.requests import Requests
from quire.core.restores import Moves
from quire.core.running import Running
from quire.core.sequence import Sequence
from quire.core.speculation import Speculation
from quire.core.state_saves import Saved
from quire.core.stats import Counters
from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.request import FinishReason, GrammarKind


class StepInFlight(NamedTuple):
    """A step planned and not completed."""

    plan: StepPlan
    rows: list[Sequence]  # of each chunk
    num_decodes: int  # the number of chunks, the first ones, that are decodes and sample one token
    moves: Moves | None = None  # between the device and the host
    saved: tuple[Saved, ...] = ()


class StepCompletion:
    """Turns the results of steps into updates. Owned by the scheduler."""

    def __init__(self, running: Running, requests: Requests, counters: Counters, speculation: Speculation) -> None:
        self._running = running
        self._requests = requests
        self._counters = counters
        self._speculation = speculation

    def complete(self, step: StepInFlight, result: StepResult) -> tuple[list[Update], list[Failure]]:
        """Apply results to rows whose epoch is unchanged."""
        plan, rows, num_decodes, moves, saved = step
        if result.step != plan.step:
            raise ValueError(f"step {plan.step} is the oldest in flight, the result is of step {result.step}")
        num_sampled = num_decodes + sum(chunk.samples for chunk in islice(plan.chunks, num_decodes, None))
        if len(result.tokens) != num_sampled:
            raise ValueError(f"step {plan.step} samples in {num_sampled} chunks, the result has {len(result.tokens)}")
        if moves is not None:
            self._apply_moves(moves)
        if result.lost_pages and self._running.host is not None:
            self._running.host.lose(result.lost_pages)
        saves = [(save, save.epoch == save.sequence.epoch) for save in saved]  # some may end now
        updates: list[Update] = []
        if result.logprobs or result.failed:
            num_decodes = 0
        else:
            self._apply_decodes(islice(zip(plan.chunks, rows, result.tokens, strict=False), num_decodes), updates)
        failures: list[Failure] = []
        sampled = islice(result.tokens, num_decodes, None)
        for index in range(num_decodes, len(rows)):
            chunk, sequence = plan.chunks[index], rows[index]
            tokens = next(sampled) if chunk.samples else []
            if chunk.epoch != sequence.epoch:
                self._counters.dropped_chunks += 1
                continue
            failed = result.failed.get(index)
            if failed is not None and not (tokens and sequence.stopping.ends(tokens, sequence.num_generated)):
                self._requests.abort(sequence.request_id)
                failures.append(Failure(sequence.request_id, _error_of(failed, sequence)))
                continue
            update = self._apply(sequence, chunk, index, tokens, result)
            if update is not None:
                updates.append(update)
        if saves:
            self._running.confirm_saves(saves)
        return updates, failures

    def _apply_moves(self, moves: Moves) -> None:
        """Pages that were copied count from now on, where they went."""
        host = self._running.host
        assert host is not None
        host.confirm(moves.saved)
        host.num_saved += len(moves.saved)
        for sequence, epoch, end, pages in moves.restored:
            host.release(pages)
            host.num_restored += len(pages)
            if epoch == sequence.epoch:
                sequence.num_computed = end
                self._running.publish(sequence)

    def _apply_decodes(self, decodes: Iterable[tuple[Chunk, Sequence, list[int]]], updates: list[Update]) -> None:
        """The same as `_apply`, for rows that sampled one token and nothing else. Most rows of most steps are such."""
        new_update = tuple.__new__  # the same as Update(...) at half its cost: this loop is most of a completion
        for chunk, sequence, tokens in decodes:
            if chunk.epoch != sequence.epoch:
                self._counters.dropped_chunks += 1
                continue
            (token,) = tokens
            known = sequence.tokens
            known.append(token)
            sequence.num_computed += 1
            finish = None
            if len(known) >= sequence.limit or token in sequence.stopping.watched:
                finish = sequence.stopping.reason(token, len(known) - sequence.num_prompt)
                if finish is not None:
                    self._requests.end(sequence)
            updates.append(
                new_update(
                    Update,
                    (chunk.request_id, chunk.sample, tokens, finish, sequence.cached_tokens, None, None, None),
                )
            )

    def _apply(
        self, sequence: Sequence, chunk: Chunk, index: int, tokens: list[int], result: StepResult
    ) -> Update | None:
        """Append what a chunk sampled, and end the sequence where it ends."""
        known = sequence.tokens
        if chunk.kind is Kind.FORCED:
            tokens = sequence.forced_before(chunk.start + chunk.length) + tokens
        guesses: Guesses | None = None
        if chunk.kind is Kind.VERIFY:
            num_guesses, num_right = chunk.length - 1, len(tokens) - 1
            sequence.num_unsure -= num_guesses
            sequence.num_planned -= num_guesses - num_right
            self._speculation.learn(sequence, num_guesses, num_right)
            guesses = Guesses(num_guesses, num_right)
        finish: FinishReason | None = None
        for position, token in enumerate(tokens):
            known.append(token)
            finish = sequence.stopping.reason(token, len(known) - sequence.num_prompt)
            if finish is not None:
                tokens = tokens[: position + 1]
                break
        prompt_logprobs = None
        if chunk.kind is not Kind.PREFILL:
            # Not what was computed beyond its end.
            sequence.num_computed = len(known) - 1 if chunk.samples else chunk.start + chunk.length
        else:
            sequence.num_computed = chunk.start + chunk.length
            if sequence.request.prompt_logprobs is not None:
                prompt_logprobs = _new_prompt_logprobs(sequence, chunk, result.prompt_logprobs.get(index, []))
            if not chunk.samples and sequence.num_computed == sequence.limit:
                finish = FinishReason.LENGTH  # nothing was to be generated
            if finish is None:
                self._running.publish(sequence, is_last=chunk.samples)
        if finish is not None:
            self._requests.end(sequence)
        elif not tokens and not prompt_logprobs:
            return None
        logprobs = result.logprobs.get(index) if result.logprobs else None
        return Update(
            sequence.request_id,
            sequence.sample,
            tokens,
            finish,
            sequence.cached_tokens,
            None if logprobs is None else logprobs[: len(tokens)],
            prompt_logprobs,
            guesses if guesses is None else guesses._replace(right=min(guesses.right, len(tokens) - 1)),
        )


def _new_prompt_logprobs(sequence: Sequence, chunk: Chunk, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """The log-probabilities that were not handed out before a preemption."""
    new = logprobs[max(0, sequence.num_scored - chunk.start) :]
    sequence.num_scored += len(new)
    return new


def _error_of(reason: str, sequence: Sequence) -> QuireError:
    """The error of a request whose row has failed. Rules about tokens, and ends that must not come yet, are the
    request's own words; without them its grammar or the model's numbers leave no token, which may be a fault of ours.
    """
    request = sequence.request
    has_rules = request.grammar is not None and request.grammar.kind is GrammarKind.TOKENS
    is_too_early = sequence.num_generated < request.min_tokens
    return InvalidRequest(reason) if reason == NO_TOKEN_LEFT and (has_rules or is_too_early) else RequestFailed(reason)
