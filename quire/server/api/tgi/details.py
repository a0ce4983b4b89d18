"""The parts of a reply: tokens, and how it went."""

from quire.ipc.messages import TokenLogprobs
from quire.request import FinishReason as Finish
from quire.server.api.openai.logprobs import finite
from quire.server.api.tgi.responses import FinishReason, PrefillToken, SequenceDetails, Token
from quire.server.service.answers import Answer
from quire.server.service.open_prompt import OpenPrompt
from quire.text.tokenizer import Tokenizer

FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.END: "eos_token",
    Finish.STOP_TOKEN: "stop_sequence",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "length",
}


def seed_shown(prompt: OpenPrompt) -> int | None:
    """The seed of a sampled answer; None for greedy decoding, which uses none."""
    return prompt.request.seed if prompt.request.sampling.temperature else None


def token_entry(tokenizer: Tokenizer, token: int, text: str, logprob: float) -> Token:
    """`text` is what the answer gains by the token; a special one shows its name instead."""
    special = tokenizer.is_special(token)
    return {
        "id": token,
        "text": tokenizer.piece(token) if special else text,
        "logprob": finite(logprob),
        "special": special,
    }


def top_entries(tokenizer: Tokenizer, logprobs: TokenLogprobs, count: int) -> list[Token]:
    pairs = zip(logprobs.top_ids[:count], logprobs.top_logprobs[:count], strict=True)
    return [
        token_entry(tokenizer, token, tokenizer.token_bytes(token).decode(errors="replace"), logprob)
        for token, logprob in pairs
    ]


def sequence_details(tokenizer: Tokenizer, prompt: OpenPrompt, answer: Answer, top_n_tokens: int) -> SequenceDetails:
    """Everything about one whole answer."""
    entries = [
        token_entry(tokenizer, token, text, logprobs.logprob)
        for token, text, logprobs in zip(answer.tokens, answer.token_texts, answer.logprobs, strict=True)
    ]
    details: SequenceDetails = {
        "finish_reason": FINISH_REASONS[answer.finish],
        "generated_tokens": len(answer.tokens),
        "seed": seed_shown(prompt),
        "prefill": prefill_entries(tokenizer, prompt),
        "tokens": entries,
    }
    if top_n_tokens:
        details["top_tokens"] = [top_entries(tokenizer, each, top_n_tokens) for each in answer.logprobs]
    return details


def prefill_entries(tokenizer: Tokenizer, prompt: OpenPrompt) -> list[PrefillToken]:
    """The prompt's tokens with what each was worth, where asked for; the first has none."""
    if prompt.request.prompt_logprobs is None:
        return []
    scores = [None, *(finite(each.logprob) for each in prompt.logprobs)]
    return [
        {"id": token, "text": tokenizer.token_bytes(token).decode(errors="replace"), "logprob": score}
        for token, score in zip(prompt.request.prompt, scores, strict=True)
    ]
