"""Log-probabilities as the OpenAI routes write them."""

from collections.abc import Sequence

from quire.ipc.messages import TokenLogprobs
from quire.server.api.openai.responses import ChatLogprob, CompletionLogprobs, ScoredToken
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def chat_entry(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs, num_top: int) -> ChatLogprob:
    """One token of a chat completion."""
    top = zip(logprobs.top_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True)
    return {
        **_scored(tokenizer, token, logprobs.logprob),
        "top_logprobs": [_scored(tokenizer, each, logprob) for each, logprob in top],
    }


def _scored(tokenizer: Tokenizer, token: int, logprob: float) -> ScoredToken:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text. Part of a character is written as bytes, so that all tokens look different. A token that the
    tokenizer does not know has its number."""
    raw = tokenizer.token_bytes(token)
    if not raw:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
    offsets: list[int],
) -> CompletionLogprobs:
    """The columns of a completion. The first token of a prompt has no score."""
    names = [_token_name(tokenizer, token) for token in tokens]
    scores: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for name, logprob in zip(names, logprobs, strict=True):
        scores.append(None if logprob is None else finite(logprob.logprob))
        if logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for each, score in zip(logprob.top_ids[:num_top], logprob.top_logprobs[:num_top], strict=True):
            top.setdefault(_token_name(tokenizer, each), finite(score))
        top.setdefault(name, finite(logprob.logprob))
        tops.append(top)
    return {"tokens": names, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}
