"""Capabilities that a request asks for."""

from collections.abc import Callable
from typing import Any

from quire.ipc.messages import Failed
from quire.request import Request, token_rules
from tests.crossings.capability import RequestField
from tests.crossings.engine_setup import MAX_TOKENS
from tests.crossings.request_draft import MAX_ANSWER, MAX_PROMPT, RequestDraft
from tests.engine.toy_grammars import END, FORCING, LOST, thinking_toy, toy

FEW_TOKENS = tuple(range(0, 48, 6))


def _fields(**chosen: Any) -> Callable[[RequestDraft], None]:
    """Each field is one of those given."""

    def switch_on(draft: RequestDraft) -> None:
        draft.fields |= {name: draft.chance.choice(values) for name, values in chosen.items()}

    return switch_on


def _sampling(**chosen: Any) -> Callable[[RequestDraft], None]:
    def switch_on(draft: RequestDraft) -> None:
        draft.sampling |= {name: draft.chance.choice(values) for name, values in chosen.items()}

    return switch_on


def _grammar(draft: RequestDraft) -> None:
    draft.fields |= {"grammar": toy(draft.chance.choice([3, 4])), "end_ids": (END,), "max_tokens": 12}


def _forced_tokens(draft: RequestDraft) -> None:
    draft.fields |= {"grammar": toy(FORCING + draft.number % 3), "end_ids": (END,), "max_tokens": MAX_ANSWER}


def _thinking_budget(draft: RequestDraft) -> None:
    draft.fields |= {"grammar": thinking_toy(4, end=9, max_tokens=5), "end_ids": (END,), "max_tokens": MAX_ANSWER}


def _token_rules(draft: RequestDraft) -> None:
    allowed = draft.chance.choice([None, range(1, 20)])
    draft.fields["grammar"] = token_rules(allowed, [[3], [5, 6], *([n, 7] for n in range(1, 20))])


def _lost_grammar(draft: RequestDraft) -> None:
    draft.fields |= {"grammar": toy(LOST), "end_ids": (END,), "max_tokens": 12}


def _long_prompt(draft: RequestDraft) -> None:
    length = draft.chance.randrange(30, MAX_PROMPT + 1)
    draft.prompt = (*draft.prompt, *range(1, MAX_PROMPT + 1))[:length]


def _salt(draft: RequestDraft) -> None:
    draft.fields["salt"] = f"tenant {draft.number % 3}"


def _bias(draft: RequestDraft) -> None:
    draft.sampling["logit_bias"] = {1 + draft.number % 20: 100.0, 5: -100.0}


def _adapter(draft: RequestDraft) -> None:
    draft.fields["adapter"] = draft.setup.adapters[draft.number % len(draft.setup.adapters)]


def _is_lost(_: object, request: Request, failed: Failed) -> bool:
    return failed.kind == "generation" and request.grammar == toy(LOST)


def _is_late(_: object, request: Request, failed: Failed) -> bool:
    return failed.kind == "deadline_exceeded" and (request.timeout_s or request.queue_timeout_s) is not None


OPENAI = ("ChatRequest", "CompletionRequest", "ResponseRequest")


def _in(name: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{kind}.{name}" for kind in kinds)


FIELDS = [
    RequestField(
        name="adapter",
        covers=("Request.adapter", "Request.adapter_digest", "Parameters.adapter_id"),
        needs=("adapters",),
        switch_on=_adapter,
    ),
    RequestField(
        name="grammar",
        covers=(
            "Request.grammar", "Grammar.kind", "Grammar.text", "Parameters.grammar",
            *(f"{kind}.{name}" for kind in OPENAI for name in (
                "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "grammar",
            )),
            "ChatRequest.response_format", "CompletionRequest.response_format", "ResponseRequest.text",
            "MessagesRequest.output_config", "MessagesRequest.output_format",
            "ServerSettings.disable_grammar_support",
        ),
        fills="grammar",
        switch_on=_grammar,
    ),
    RequestField(name="forced tokens", fills="grammar", switch_on=_forced_tokens),
    RequestField(
        name="token rules",
        covers=tuple(f"{kind}.{name}" for kind in OPENAI for name in ("bad_words", "allowed_token_ids")),
        fills="grammar",
        switch_on=_token_rules,
    ),
    RequestField(
        name="thinking budget",
        covers=(
            "Grammar.thinking_budget",
            *(f"ThinkingBudget.{name}" for name in ("begin", "end", "is_opened", "max_tokens")),
            "ChatRequest.thinking_budget",
            "ResponseRequest.thinking_budget",
            "MessagesRequest.thinking",
        ),
        fills="grammar",
        switch_on=_thinking_budget,
    ),
    RequestField(
        name="lost grammar",  # that cannot be followed from some token on
        fills="grammar",
        switch_on=_lost_grammar,
        in_models=False,
        excuses=_is_lost,
        explains=(r"request \d+ is ended: grammar cannot be followed any further",),
    ),
    RequestField(
        name="samples",
        covers=(
            "Request.samples", *_in("n", "ChatRequest", "CompletionRequest"),
            *_in("best_of", "CompletionRequest", "Parameters"), "ServerSettings.max_best_of",
        ),
        switch_on=_fields(samples=(2, 3)),
    ),
    RequestField(
        name="log-probabilities",
        covers=(
            "SamplingParams.logprobs", *_in("logprobs", "ChatRequest", "CompletionRequest"),
            *_in("top_logprobs", "ChatRequest", "ResponseRequest"), "ResponseRequest.include",
            "Parameters.details", "Parameters.top_n_tokens", "ServerSettings.max_top_n_tokens",
        ),
        switch_on=_sampling(logprobs=(0, 1)),
    ),
    RequestField(
        name="log-probabilities of the prompt",
        covers=(
            "Request.prompt_logprobs", "CompletionRequest.echo", "Parameters.decoder_input_details",
            "ServerSettings.enable_prefill_logprobs",
        ),
        switch_on=_fields(prompt_logprobs=(0, 1)),
    ),
    RequestField(
        name="penalties",
        covers=(
            *(f"SamplingParams.{name}" for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")),
            *_in("repetition_penalty", *OPENAI, "Parameters"),
            *_in("frequency_penalty", *OPENAI, "Parameters"),
            *_in("presence_penalty", *OPENAI, "Parameters"),
        ),
        switch_on=_sampling(repetition_penalty=(1.0, 1.8), frequency_penalty=(0.5, 1.5), presence_penalty=(0.0, 1.0)),
    ),
    RequestField(
        name="logit bias",
        covers=("SamplingParams.logit_bias", *_in("logit_bias", *OPENAI)),
        switch_on=_bias,
    ),
    RequestField(
        name="sampled",
        covers=(
            "SamplingParams.temperature", "Request.seed",
            *_in("temperature", *OPENAI, "MessagesRequest", "Parameters"), "Parameters.do_sample",
            *_in("seed", *OPENAI, "Parameters"), "ServerSettings.seed",
        ),
        switch_on=_sampling(temperature=(0.7, 1.0)),
    ),
    RequestField(
        name="filters of draws",
        covers=(
            *(f"{kind}.{name}" for kind in ("SamplingParams", *OPENAI, "Parameters") for name in (
                "top_k", "top_p", "min_p", "typical_p",
            )),
            "MessagesRequest.top_k", "MessagesRequest.top_p",
        ),
        switch_on=_sampling(temperature=(1.0, 1.5), top_k=(0, 1, 7), top_p=(1.0, 0.8), min_p=(0.0, 0.02),
                            typical_p=(1.0, 0.9)),
    ),
    RequestField(
        name="end",
        covers=("Request.end_ids",),
        switch_on=_fields(end_ids=((3,), FEW_TOKENS)),
        fills="end",
    ),
    RequestField(
        name="no end",
        covers=("Request.ignore_end", *_in("ignore_eos", *OPENAI)),
        switch_on=_fields(end_ids=(FEW_TOKENS,), ignore_end=(True,)),
        fills="end",
    ),
    RequestField(
        name="least tokens",
        covers=("Request.min_tokens", *_in("min_tokens", *OPENAI)),
        switch_on=_fields(end_ids=(FEW_TOKENS,), min_tokens=(2, 6)),
        fills="end",
    ),
    RequestField(
        name="stop tokens",
        covers=("Request.stop_ids", *_in("stop_token_ids", *OPENAI)),
        switch_on=_fields(stop_ids=((7, 8), FEW_TOKENS)),
    ),
    RequestField(
        name="prompt alone",
        covers=(
            "Request.max_tokens",
            *_in("max_tokens", "ChatRequest", "CompletionRequest", "MessagesRequest"),
            "ChatRequest.max_completion_tokens", "ResponseRequest.max_output_tokens", "Parameters.max_new_tokens",
        ),
        switch_on=_fields(max_tokens=(0,)),
        fills="grammar",  # of which there is nothing to follow
    ),
    RequestField(
        name="long prompt",
        covers=(
            "Request.prompt", "CompletionRequest.prompt", "GenerateRequest.inputs", "Limits.max_sequence_tokens",
            "Config.max_total_tokens",
        ),
        switch_on=_long_prompt,
    ),
    RequestField(
        name="timings",
        covers=("Request.timings", *_in("timings", *OPENAI, "MessagesRequest", "GenerateRequest")),
        switch_on=_fields(timings=(True,)),
    ),
    RequestField(name="tracing", covers=("Request.traced",), switch_on=_fields(traced=(True,))),
    RequestField(
        name="priority",
        covers=("Request.priority", *_in("priority", *OPENAI)),
        switch_on=_fields(priority=(-1, 1, 2)),
    ),
    RequestField(
        name="salt",
        covers=("Request.salt", *_in("cache_salt", *OPENAI), "ServerSettings.isolate_api_keys"),
        switch_on=_salt,
    ),
    RequestField(
        name="deadline to start",
        covers=("Request.queue_timeout_s", "ServerSettings.queue_timeout_s"),
        switch_on=_fields(queue_timeout_s=(0.02, 0.1, 100.0, 100.0)),
        excuses=_is_late,
    ),
    RequestField(
        name="deadline",
        covers=("Request.timeout_s", "ServerSettings.request_timeout_s"),
        switch_on=_fields(timeout_s=(0.05, 0.2, 100.0, 100.0)),
        excuses=_is_late,
    ),
]  # fmt: skip

assert MAX_PROMPT + MAX_ANSWER < MAX_TOKENS
