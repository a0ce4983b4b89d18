"""The parts of an answer, thinking, text and calls, as OpenAI writes them."""

from quire.request import FinishReason as Finish
from quire.server.api.answer_reader import AnswerReader
from quire.server.api.openai.responses import (
    FinishReason,
    FunctionCall,
    MessageContent,
    MessagePart,
    ToolCall,
    ToolCallPart,
)
from quire.server.api.tool_use import new_call_id
from quire.server.service.answers import Answer
from quire.text.answer_parts import AnswerForm, CallBegins, Piece, Reasoning


class AnswerParts:
    """The parts of one answer."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._reader = AnswerReader(form)
        self._is_custom = False  # the tool of the last call

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def finish_reason(self, finish: Finish, otherwise: FinishReason) -> FinishReason:
        """`tool_calls` if there are calls, unless the answer was truncated."""
        return "tool_calls" if self._reader.num_calls and finish is not Finish.LENGTH else otherwise

    def deltas(self, text: str, *, is_last: bool, has_token: bool) -> list[MessagePart]:
        """The `delta`s of chunks, one after the other."""
        return [self._delta(piece) for piece in self._reader.read(text, is_last=is_last, has_token=has_token)]

    def message(self, answer: Answer) -> MessageContent:
        """The content, thinking and calls of a whole answer's `message`."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for piece in self._reader.read_all(answer):
            if isinstance(piece, str):
                content.append(piece)
            elif isinstance(piece, Reasoning):
                reasoning.append(piece.text)
            elif not isinstance(piece, CallBegins):
                self._add_arguments(calls[piece.number], piece.text)
            elif piece.name in self._form.custom:
                calls.append(
                    {
                        "id": new_call_id(self._form, "call_"),
                        "type": "custom",
                        "custom": {"name": piece.name, "input": ""},
                    }
                )
            else:
                function: FunctionCall = {"name": piece.name, "arguments": ""}
                calls.append({"id": new_call_id(self._form, "call_"), "type": "function", "function": function})
        text = "".join(content)
        message: MessageContent = {"content": text or None if calls else text}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    def _add_arguments(self, call: ToolCall, text: str) -> None:
        if "custom" in call:
            call["custom"]["input"] += text
        else:
            call["function"]["arguments"] += text

    def _delta(self, piece: Piece) -> MessagePart:
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        call: ToolCallPart = {"index": piece.number}
        if isinstance(piece, CallBegins):
            self._is_custom = piece.name in self._form.custom
            call["id"] = new_call_id(self._form, "call_")
            call["type"] = "custom" if self._is_custom else "function"
            if self._is_custom:
                call["custom"] = {"name": piece.name, "input": ""}
            else:
                call["function"] = {"name": piece.name, "arguments": ""}
        elif self._is_custom:
            call["custom"] = {"input": piece.text}
        else:
            call["function"] = {"arguments": piece.text}
        return {"tool_calls": [call]}
