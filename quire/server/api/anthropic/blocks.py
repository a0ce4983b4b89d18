"""Converts the pieces of an answer to content blocks: the events of a stream, and the blocks of a whole answer."""

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.server.api.anthropic.responses import (
    BlockChange,
    BlockEvent,
    ContentBlock,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from quire.server.api.tool_use import new_call_id
from quire.text.answer_parts import AnswerForm, CallArguments, CallBegins, Piece, Reasoning
from quire.text.cut_object import complete_object


class BlockEvents:
    """The events of one answer's blocks. A block is open until a piece of another kind comes."""

    def __init__(self, form: AnswerForm, *, shows_thinking: bool, omits_thoughts: bool = False) -> None:
        """`omits_thoughts`: thinking blocks come without their text."""
        self._form = form
        self._shows_thinking = shows_thinking
        self._omits_thoughts = omits_thoughts
        self._index = -1  # of the last block
        self._kind: type[Any] | None = None  # of the pieces of the open block
        self._blanks: list[str] = []  # whitespace at the start of a text; it is no block by itself
        self._thoughts = hashlib.sha256()

    def push(self, pieces: Iterable[Piece]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for piece in pieces:
            self._add(piece, events)
        return events

    def finish(self) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if self._blanks and self._index < 0:
            self._add_text("", events)  # the answer is whitespace only
        self._close(events)
        return events

    def _add(self, piece: Piece, events: list[BlockEvent]) -> None:
        if isinstance(piece, CallBegins):
            self._open(
                CallBegins, ToolUseBlock(id=new_call_id(self._form, "toolu_"), name=piece.name, input={}), events
            )
        elif isinstance(piece, CallArguments):
            self._change(InputJsonDelta(piece.text), events)
        elif isinstance(piece, Reasoning):
            if not self._shows_thinking:
                return
            if self._kind is not Reasoning:
                self._thoughts = hashlib.sha256()
                self._open(Reasoning, ThinkingBlock(), events)
            self._blanks = []  # between thoughts
            self._thoughts.update(piece.text.encode())
            if not self._omits_thoughts:
                self._change(ThinkingDelta(piece.text), events)
        elif self._kind is not str and piece.isspace():
            self._blanks.append(piece)
        else:
            self._add_text(piece, events)

    def _add_text(self, text: str, events: list[BlockEvent]) -> None:
        if self._kind is not str:
            text = "".join([*self._blanks, text])
            self._open(str, TextBlock(), events)
        self._change(TextDelta(text), events)

    def _open(self, kind: type[Any], block: ContentBlock, events: list[BlockEvent]) -> None:
        self._close(events)
        self._blanks = []
        self._kind = kind
        self._index += 1
        events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _change(self, delta: BlockChange, events: list[BlockEvent]) -> None:
        events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, events: list[BlockEvent]) -> None:
        if self._kind is None:
            return
        if self._kind is Reasoning:
            signature = base64.b64encode(self._thoughts.digest()).decode()
            self._change(SignatureDelta(signature), events)
        events.append({"type": "content_block_stop", "index": self._index})
        self._kind = None


def merge_events(events: Iterable[BlockEvent]) -> list[ContentBlock]:
    """The blocks of a whole answer."""
    blocks: list[Any] = []
    inputs: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            index, delta = event["index"], event["delta"]
            if isinstance(delta, TextDelta):
                blocks[index].text += delta.text
            elif isinstance(delta, ThinkingDelta):
                blocks[index].thinking += delta.thinking
            elif isinstance(delta, SignatureDelta):
                blocks[index].signature += delta.signature
            else:
                inputs.setdefault(index, []).append(delta.partial_json)
    for index, parts in inputs.items():
        blocks[index].input = msgspec.Raw(complete_object("".join(parts)).encode())
    return blocks
