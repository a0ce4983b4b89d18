"""The timings of a request, as answers and spans show them."""

from typing import TypedDict

from quire.server.service.stream import Stream


class Timings(TypedDict):
    validation_s: float
    tokenising_s: float
    queue_s: float
    blocked_s: dict[str, float]
    prefill_s: float
    decode_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    prefill_chunks: int
    prefill_tokens: int
    preemptions: int
    engine_restarts: int
    generated_tokens: int
    guessed_tokens: int
    right_guesses: int
    decode_steps: int
    tokens_per_s: float | None


def ledger(stream: Stream) -> Timings:
    """Seconds of checking, tokenising, waiting for a slot, prefill and decode, with counts of the work done.

    The first five, less what tokenising took of checking, add up to the total.
    """
    times = stream.times
    queue_s, decode_s = times.queue_s, times.decode_s
    accounts = [account for prompt in stream.prompts for account in prompt.accounts]
    blocked: dict[str, float] = {}
    for account in (prompt.accounts[0] for prompt in stream.prompts if prompt.accounts):
        for name, seconds in account.blocked_s.items():
            blocked[name] = max(blocked.get(name, 0.0), seconds)
    if queue_s > sum(blocked.values()):
        blocked["step"] = queue_s - sum(blocked.values())  # no step is planned while one is under way
    samples = [sample for prompt in stream.prompts for sample in prompt.samples]
    return {
        "validation_s": times.validation_s - times.tokenising_s,
        "tokenising_s": times.tokenising_s,
        "queue_s": queue_s,
        "blocked_s": blocked,
        "prefill_s": times.prefill_s,
        "decode_s": decode_s,
        "total_s": times.answer_s,
        "prompt_tokens": stream.num_prompt_tokens,
        "cached_tokens": stream.num_cached_tokens,
        "prefill_chunks": sum(account.prefill_chunks for account in accounts),
        "prefill_tokens": sum(account.prefill_tokens for account in accounts),
        "preemptions": sum(account.preemptions for account in accounts),
        "engine_restarts": max((len(prompt.accounts) - 1 for prompt in stream.prompts if prompt.accounts), default=0),
        "generated_tokens": stream.num_tokens,
        "guessed_tokens": stream.num_guesses,
        "right_guesses": sum(count * steps for count, steps in stream.right_guesses.items()),
        "decode_steps": max(max(0, sample.num_pushes - 1) for sample in samples),
        "tokens_per_s": (stream.num_tokens - 1) / decode_s if decode_s > 0 else None,
    }
