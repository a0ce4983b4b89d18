"""Completions as bodies and as chunks."""

from collections.abc import Sequence

import msgspec

from quire.ipc.messages import TokenLogprobs
from quire.request import FinishReason as Finish
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.envelope import Chunks, Envelope
from quire.server.api.openai.logprobs import completion_logprobs
from quire.server.api.openai.requests import CompletionRequest
from quire.server.api.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from quire.server.http.sse import to_json, token_template
from quire.server.service.answers import Answer, by_likelihood
from quire.server.service.open_prompt import OpenPrompt, TokenDelta
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream
from quire.text.text_offsets import TextOffsets, prompt_offsets


class CompletionEncoder:
    """Writes the answers to one request: the best `n` of each prompt."""

    def __init__(
        self, model: ServedModel, fields: CompletionRequest, texts: list[str], n: int, dialect: OpenAIDialect
    ) -> None:
        self.fields = fields
        self.texts = texts  # of the prompts
        self.n = n
        self._tokenizer = model.tokenizer
        self._dialect = dialect
        self.envelope = Envelope("cmpl", dialect, model.name_in_answers(fields.model), fields)

    def events(self, stream: Stream) -> "CompletionEvents":
        return CompletionEvents(stream, self)

    def body(self, stream: Stream, answers: list[list[Answer]]) -> Completion:
        choices: list[CompletionChoice] = []
        for prompt, samples in zip(stream.prompts, answers, strict=True):
            if len(samples) > self.n:
                samples = by_likelihood(samples)
            choices += [self._whole(prompt, answer, len(choices) + i) for i, answer in enumerate(samples[: self.n])]
        whole: Completion = {
            **self.envelope.head("text_completion"),  # type: ignore[typeddict-item]  # mypy fears keys beyond a Head's
            "choices": choices,
            "usage": self.envelope.usage(stream),
        }
        whole.update(self.envelope.timings(stream))  # type: ignore[typeddict-item]
        return whole

    def _whole(self, prompt: OpenPrompt, answer: Answer, index: int) -> CompletionChoice:
        text, logprobs = answer.text, None
        if self.fields.logprobs is not None:
            offsets = self.offsets(prompt)
            logprobs = self._logprobs(answer.tokens, [*answer.logprobs], [offsets.push(one) for one in answer.tokens])
        if self.fields.echo:
            text = self.texts[prompt.index] + text
            before = self._prompt_logprobs(prompt)
            if logprobs is not None and before is not None:
                logprobs = _joined(before, logprobs)
        choice = self._choice(index, text, answer.finish, logprobs)
        if self.fields.return_token_ids:
            choice["token_ids"] = answer.tokens
            choice["prompt_token_ids"] = list(prompt.request.prompt)
        return choice

    def echo(self, prompt: OpenPrompt, index: int) -> CompletionChoice:
        """The prompt itself, as the first chunk of a stream."""
        return self._choice(index, self.texts[prompt.index], None, self._prompt_logprobs(prompt))

    def part(self, delta: TokenDelta, index: int, offsets: TextOffsets) -> CompletionChoice:
        """A chunk of a stream. `offsets` are those of its choice."""
        logprobs = None
        if delta.token is not None and self.fields.logprobs is not None:
            logprobs = self._logprobs([delta.token], [delta.logprobs], [offsets.push(delta.token)])
        choice = self._choice(index, delta.text, delta.finish, logprobs)
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if delta.token is None else [delta.token]
        return choice

    def offsets(self, prompt: OpenPrompt) -> TextOffsets:
        """The offsets of one answer's tokens, in the order in which they come."""
        return TextOffsets(
            self._tokenizer,
            begin=len(self.texts[prompt.index]) if self.fields.echo else 0,
            skip_special_tokens=self.fields.skip_special_tokens is not False,
        )

    def _choice(
        self, index: int, text: str, finish: Finish | None, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        dialect = self._dialect
        reason = dialect.completion_unfinished if finish is None else dialect.completion_finish_reasons[finish]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_logprobs(self, prompt: OpenPrompt) -> CompletionLogprobs | None:
        if self.fields.logprobs is None:
            return None
        tokens = prompt.request.prompt
        offsets = prompt_offsets(self._tokenizer, tokens, self.texts[prompt.index])
        return self._logprobs(tokens, [None, *prompt.logprobs], offsets)

    def _logprobs(
        self, tokens: Sequence[int], scores: list[TokenLogprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        return completion_logprobs(self._tokenizer, tokens, scores, self.fields.logprobs or 0, offsets)


def _joined(before: CompletionLogprobs, after: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": before["tokens"] + after["tokens"],
        "token_logprobs": before["token_logprobs"] + after["token_logprobs"],
        "top_logprobs": before["top_logprobs"] + after["top_logprobs"],
        "text_offset": before["text_offset"] + after["text_offset"],
    }


class CompletionEvents(Chunks):
    """Chunks of a completion. Most of a plain chunk is the same bytes every time."""

    def __init__(self, stream: Stream, encoder: CompletionEncoder) -> None:
        fields = encoder.fields
        super().__init__(stream, fields, encoder.envelope, "text_completion")
        self._fields = fields
        self._encoder = encoder
        self._n = encoder.n
        if fields.echo:  # the echoed prompt with its log-probabilities is one event
            num_characters = sum(map(len, encoder.texts))
            self.largest_event = stream.num_prompt_tokens * (1 + (fields.logprobs or 0)) + num_characters
        self._is_plain = fields.logprobs is None and not fields.return_token_ids and not self._varies
        self._offsets: dict[int, TextOffsets] = {}  # by choice; a choice is added when it begins
        unfinished = msgspec.json.encode(self._dialect.completion_unfinished)
        end = b',"logprobs":null,"finish_reason":' + unfinished + b"}" + self._tail
        self._plain = token_template(self._head + b'{"index":', b',"text":', end)

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        if not self._is_plain:
            return b"".join([self._chunk(delta) for delta in deltas])
        written = b""
        for delta in deltas:  # mostly one; this runs for every token
            prompt, sample, text, _, _, finish = delta
            index = prompt * self._n + sample
            if finish is not None or index not in self._offsets:
                written += self._chunk(delta)
            elif text:
                written += self._plain % (index, to_json(text))
        return written

    def _chunk(self, delta: TokenDelta) -> bytes:
        index = delta.prompt * self._n + delta.sample
        before = b""
        if index not in self._offsets:
            prompt = self._stream.prompts[delta.prompt]
            self._offsets[index] = self._encoder.offsets(prompt)
            if self._fields.echo:
                before = self._write(self._encoder.echo(prompt, index))
        if self._is_plain and not delta.text and delta.finish is None:
            return before
        return before + self._write(self._encoder.part(delta, index, self._offsets[index]))
