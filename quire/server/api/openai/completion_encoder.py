"""Completions as bodies and as chunks."""

import msgspec

from quire.ipc.messages import TokenLogprobs
from quire.request import FinishReason as Finish
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.envelope import Chunks, Envelope
from quire.server.api.openai.logprobs import completion_logprobs, token_name
from quire.server.api.openai.requests import CompletionRequest
from quire.server.api.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from quire.server.http.sse import to_json, token_template
from quire.server.service.answers import Answer, by_likelihood
from quire.server.service.open_prompt import OpenPrompt, TokenDelta
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream


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
        text, tokens = answer.text, answer.tokens
        scores: list[TokenLogprobs | None] = [*answer.logprobs]
        if self.fields.echo:
            text = self.texts[prompt.index] + text
            tokens = [*prompt.request.prompt, *tokens]
            scores = [None, *prompt.logprobs, *scores]
        choice = self._choice(index, text, answer.finish, self._logprobs(tokens, scores))
        if self.fields.return_token_ids:
            choice["token_ids"] = answer.tokens
            choice["prompt_token_ids"] = list(prompt.request.prompt)
        return choice

    def echo(self, prompt: OpenPrompt, index: int) -> CompletionChoice:
        """The prompt itself, as the first chunk of a stream."""
        scores = [None, *prompt.logprobs]
        return self._choice(index, self.texts[prompt.index], None, self._logprobs([*prompt.request.prompt], scores))

    def part(self, delta: TokenDelta, index: int, offset: int) -> CompletionChoice:
        logprobs = None if delta.token is None else self._logprobs([delta.token], [delta.logprobs], offset)
        choice = self._choice(index, delta.text, delta.finish, logprobs)
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if delta.token is None else [delta.token]
        return choice

    def length(self, tokens: tuple[int, ...]) -> int:
        """The number of characters of tokens, as offsets count them."""
        return sum(len(token_name(self._tokenizer, token)) for token in tokens)

    def _choice(
        self, index: int, text: str, finish: Finish | None, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        dialect = self._dialect
        reason = dialect.completion_unfinished if finish is None else dialect.completion_finish_reasons[finish]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(
        self, tokens: list[int], scores: list[TokenLogprobs | None], offset: int = 0
    ) -> CompletionLogprobs | None:
        num_top = self.fields.logprobs
        return None if num_top is None else completion_logprobs(self._tokenizer, tokens, scores, num_top, offset)


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
        self._offsets: dict[int, int] = {}  # characters so far, by choice; a choice is added when it begins
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
            self._offsets[index] = self._encoder.length(prompt.request.prompt) if self._fields.echo else 0
            if self._fields.echo:
                before = self._write(self._encoder.echo(prompt, index))
        if self._is_plain and not delta.text and delta.finish is None:
            return before
        written = self._write(self._encoder.part(delta, index, self._offsets[index]))
        if self._fields.logprobs is not None and delta.token is not None:
            self._offsets[index] += self._encoder.length((delta.token,))
        return before + written
