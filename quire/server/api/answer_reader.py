"""Splits chat answers into pieces, for every API."""

from typing import Any

from quire.server.service.answers import Answer
from quire.text.answer_parts import AnswerForm, AnswerParser, CallArguments, CallBegins, Piece, Reasoning


class AnswerReader:
    """Cuts one sample into pieces, token by token, and counts the tokens of its thinking."""

    def __init__(self, form: AnswerForm) -> None:
        self._parser = AnswerParser(form)
        self.num_reasoning_tokens = 0  # includes the marks around the thinking

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def read(self, text: str, *, is_last: bool, has_token: bool = True) -> list[Piece]:
        """The pieces that a token's text completes."""
        parser = self._parser
        was_thinking = parser.is_thinking
        pieces = parser.push(text)
        self.num_reasoning_tokens += has_token and (was_thinking or parser.is_thinking)
        return pieces + parser.flush() if is_last else pieces

    def read_all(self, answer: Answer) -> list[Piece]:
        """The pieces of a whole answer, one for each part."""
        num_tokens, last = len(answer.token_texts), len(answer.texts) - 1
        parts: list[tuple[Any, list[str]]] = []
        for index, text in enumerate(answer.texts):
            for piece in self.read(text, is_last=index == last, has_token=index < num_tokens):
                if isinstance(piece, CallBegins):
                    parts.append((piece, []))
                    continue
                kind = type(piece), piece.number if isinstance(piece, CallArguments) else 0
                if not parts or parts[-1][0] != kind:
                    parts.append((kind, []))
                parts[-1][1].append(piece if isinstance(piece, str) else piece.text)
        return [_joined(kind, texts) for kind, texts in parts]


def _joined(kind: Any, texts: list[str]) -> Piece:
    if isinstance(kind, CallBegins):
        return kind
    piece_type, number = kind
    text = "".join(texts)
    if piece_type is CallArguments:
        return CallArguments(number, text)
    return Reasoning(text) if piece_type is Reasoning else text
