"""The output items of an answer, and the events that tell of them."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from quire.server.api.openai.envelope import padding
from quire.server.api.responses.items import new_id, sealed
from quire.server.api.tool_use import new_call_id
from quire.server.service.response_database import Item
from quire.text.answer_parts import AnswerForm, CallArguments, CallBegins, Piece, Reasoning

Event = tuple[str, dict[str, Any]]  # its type without "response.", and its fields


class Open(ABC):
    """An item that the answer is in the middle of."""

    prefix: ClassVar[str]
    delta_event: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @abstractmethod
    def item(self, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        """`is_begun`: as it is before any of its text."""

    @abstractmethod
    def done(self) -> tuple[str, dict[str, Any]]:
        """The event with its whole text."""


class OpenText(Open):
    """An item with its text as a part of its content."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.place["content_index"] = 0

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]: ...


class OpenMessage(OpenText):
    prefix, delta_event = "msg", "output_text.delta"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[Any] = []

    def item(self, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        content = [] if is_begun else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> tuple[str, dict[str, Any]]:
        return "output_text.done", {"text": self.text, "logprobs": self.logprobs}


class OpenReasoning(OpenText):
    prefix, delta_event = "rs", "reasoning_text.delta"
    is_sealed = False

    def item(self, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        content = [] if is_begun else [self.part(self.text)]
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self.is_sealed:
            item["encrypted_content"] = sealed("" if is_begun else self.text)
        return item

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def done(self) -> tuple[str, dict[str, Any]]:
        return "reasoning_text.done", {"text": self.text}


class OpenCall(Open):
    prefix, delta_event = "fc", "function_call_arguments.delta"

    def __init__(self, index: int, name: str, call_id: str) -> None:
        super().__init__(index)
        self.name = name
        self.call_id = call_id

    def item(self, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        called = {"call_id": self.call_id, "name": self.name, "arguments": "" if is_begun else self.text}
        return {"id": self.id, "type": "function_call", "status": status} | called

    def done(self) -> tuple[str, dict[str, Any]]:
        return "function_call_arguments.done", {"arguments": self.text}


class OpenCustomCall(OpenCall):
    prefix, delta_event = "ctc", "custom_tool_call_input.delta"

    def item(self, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        called = {"call_id": self.call_id, "name": self.name, "input": "" if is_begun else self.text}
        return {"id": self.id, "type": "custom_tool_call", "status": status} | called

    def done(self) -> tuple[str, dict[str, Any]]:
        return "custom_tool_call_input.done", {"input": self.text}


class Output:
    """Makes items of the pieces of one answer, in order; one is open at a time.

    Blanks between parts, as before a call, are no message of their own.
    """

    def __init__(self, form: AnswerForm, *, is_streamed: bool, is_sealed: bool, pads: bool) -> None:
        """`is_sealed`: thinking is also in `encrypted_content`. `pads`: deltas do not tell the length of tokens."""
        self._form = form
        self._is_streamed = is_streamed
        self._events: list[Event] = []  # events since the last `take_events`
        self._is_sealed = is_sealed
        self._pads = pads
        self._open: Open | None = None
        self._blanks: list[str] = []
        self._logprobs: list[Any] = []  # log-probabilities of tokens that have not completed any text
        self.items: list[Item] = []  # complete

    def add(self, pieces: list[Piece], logprob: Any = None) -> None:
        """The pieces that one token completes, and its log-probability where those are asked for."""
        if logprob is not None:
            self._logprobs.append(logprob)
        for piece in pieces:
            if isinstance(piece, str):
                self._add_text(piece)
                continue
            self._blanks = []
            self._logprobs = []
            if isinstance(piece, Reasoning):
                self._delta(self._opened(OpenReasoning), piece.text)
            elif isinstance(piece, CallBegins):
                kind = OpenCustomCall if piece.name in self._form.custom else OpenCall
                call_id = new_call_id(self._form, "call_")
                self._begin(kind(len(self.items) + (self._open is not None), piece.name, call_id))
            elif isinstance(piece, CallArguments) and self._open is not None:
                self._delta(self._open, piece.text)

    def finish(self, *, is_cut: bool) -> None:
        """The answer is over. `is_cut`: by its length."""
        if self._open is None and not self.items:  # an answer without anything is an empty message
            self._delta(self._opened(OpenMessage), "".join(self._blanks))
        if isinstance(self._open, OpenMessage):
            self._open.logprobs += self._logprobs
        self._close("incomplete" if is_cut else "completed")

    @property
    def open_message(self) -> OpenMessage | None:
        return self._open if isinstance(self._open, OpenMessage) else None

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        if self._is_streamed:
            self._events.append((event, fields))

    def _add_text(self, text: str) -> None:
        if not isinstance(self._open, OpenMessage) and not text.strip():
            self._blanks.append(text)
            return
        opened = self._opened(OpenMessage)
        if self._blanks:
            text, self._blanks = "".join(self._blanks) + text, []
        self._delta(opened, text)

    def _opened(self, kind: "type[OpenMessage] | type[OpenReasoning]") -> Open:
        if not isinstance(self._open, kind):
            self._begin(kind(len(self.items) + (self._open is not None)))
        assert self._open is not None
        return self._open

    def _begin(self, item: Open) -> None:
        self._close("completed")
        self._open = item
        if isinstance(item, OpenReasoning):
            item.is_sealed = self._is_sealed
        index = item.place["output_index"]
        self._emit("output_item.added", {"output_index": index, "item": item.item("in_progress", is_begun=True)})
        if isinstance(item, OpenText):
            self._emit("content_part.added", {**item.place, "part": item.part("")})

    def _delta(self, item: Open, text: str) -> None:
        if not text:
            return
        item.texts.append(text)
        fields = {**item.place, "delta": text}
        if isinstance(item, OpenMessage):
            fields["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += fields["logprobs"]
        if self._pads:
            fields["obfuscation"] = padding(len(text.encode()))
        self._emit(item.delta_event, fields)

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        event, fields = item.done()
        self._emit(event, item.place | fields)
        if isinstance(item, OpenText):
            self._emit("content_part.done", {**item.place, "part": item.part(item.text)})
        whole = item.item(status)
        self._emit("output_item.done", {"output_index": item.place["output_index"], "item": whole})
        self.items.append(Item(item.id, msgspec.json.encode(whole)))
