"""Items of a request: checked, named, and in the form in which they are kept."""

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from quire.errors import invalid, shown
from quire.server.api.validation import MAX_NAME, Refusal, typed

Status = Literal["in_progress", "completed", "incomplete"]
ROLES = Literal["user", "assistant", "system", "developer"]
MAX_ID = 1024  # characters: kept items are found by their ids
_SEAL = "quire:"  # before thinking in `encrypted_content`, which clients hand back and do not read


class InputMessage(msgspec.Struct, kw_only=True):
    role: ROLES
    content: str | list[dict[str, Any]]
    type: str | None = None
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallInput(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str
    type: str | None = None
    id: str | None = None
    status: Status | None = None


class CustomCallInput(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    input: str
    type: str | None = None
    id: str | None = None
    status: Status | None = None


class CallOutputInput(msgspec.Struct, kw_only=True):
    """The output of a function or of a custom tool."""

    call_id: str
    output: str | list[dict[str, Any]]
    type: str | None = None
    id: str | None = None
    status: Status | None = None
    name: str | None = None


class ReasoningInput(msgspec.Struct, kw_only=True):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    type: str | None = None
    id: str | None = None
    status: Status | None = None


_CALL_REFUSALS = {
    "caller": Refusal("calls come from the model itself", ({"type": "direct"},)),
    "namespace": Refusal("tools have no namespaces"),
    "async": Refusal("calls are answered in order", (False,)),
    "created_by": Refusal("items have no authors"),
}
_PART_KEYS = frozenset({"type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint"})
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ItemReader:
    """Reads the items of one request. `unknown` gathers the names of fields that are not known."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.unknown: list[str] = []

    def read(self, where: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """The item at `where` in its stored form. References are resolved elsewhere."""
        kind = kind_of(item)
        if not isinstance(kind, str) or kind not in _KINDS:
            known = ", ".join([*_KINDS, "item_reference"])
            raise invalid(f"{where}.type", f"is {shown(kind)}; it can be {known}")
        struct, refused, form = _KINDS[kind]
        fields, unknown = typed(item, struct, refused, strict=self._strict, where=f"{where}.")
        if fields.id is not None and len(fields.id) > MAX_ID:
            raise invalid(f"{where}.id", f"has {len(fields.id)} characters; the limit is {MAX_ID}")
        kept = form(where, kind, fields)
        for name in ("content", "output", "summary"):
            parts = item.get(name) if name in struct.__struct_fields__ else None
            keys = {key for part in parts for key in part} if isinstance(parts, list) else set()
            unknown += [f"{where}.{name}[].{key[:MAX_NAME]}" for key in sorted(keys - _PART_KEYS)]
        if unknown and self._strict:
            raise invalid(unknown[0], "is not a field of this route")
        self.unknown += unknown
        return kept


def kind_of(item: Mapping[str, Any]) -> Any:
    """The type of an item, which clients may leave out of messages and references."""
    kind = item.get("type")
    if kind is not None:
        return kind
    return "message" if "role" in item or "id" not in item else "item_reference"


def message(role: str, text: str, item_id: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "input_text", "text": text}
    return {"id": item_id or new_id("msg"), "type": "message", "status": "completed", "role": role, "content": [part]}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def sealed(thinking: str) -> str:
    return _SEAL + base64.b64encode(thinking.encode()).decode()


def _unsealed(where: str, content: str) -> str:
    try:
        if content.startswith(_SEAL):
            return base64.b64decode(content[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise invalid(f"{where}.encrypted_content", f"is {shown(content)}, which this server has not written")


def _message(where: str, kind: str, item: InputMessage) -> dict[str, Any]:
    if isinstance(item.content, str):
        kept = message(item.role, item.content, item.id)
        if item.role == "assistant":
            kept["content"] = [{"type": "output_text", "text": item.content, "annotations": []}]
        return kept
    parts = [_part(f"{where}.content[{number}]", item.role, part) for number, part in enumerate(item.content)]
    return {
        "id": item.id or new_id("msg"),
        "type": "message",
        "status": item.status or "completed",
        "role": item.role,
        "content": parts,
    }


def _part(where: str, role: str, part: Any) -> dict[str, Any]:
    text = _text(where, part)
    if role != "assistant":
        return {"type": "input_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}


def _text(where: str, part: Any, key_of: Mapping[str, str] = _TEXTS) -> str:
    kind = part.get("type")
    key = key_of.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise invalid(f"{where}.type", f"is {shown(kind)}; it can be {', '.join(key_of)}")
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(f"{where}.{key}", f"is {shown(text)}; it must be a string")
    return text


def _function_call(where: str, kind: str, item: FunctionCallInput) -> dict[str, Any]:
    return _of_call("fc", kind, item) | {"name": item.name, "arguments": item.arguments}


def _custom_call(where: str, kind: str, item: CustomCallInput) -> dict[str, Any]:
    return _of_call("ctc", kind, item) | {"name": item.name, "input": item.input}


def _call_output(where: str, kind: str, item: CallOutputInput) -> dict[str, Any]:
    output: Any = item.output
    if not isinstance(output, str):
        texts = [_text(f"{where}.output[{number}]", part) for number, part in enumerate(output)]
        output = [{"type": "input_text", "text": text} for text in texts]
    return _of_call("fco" if kind == "function_call_output" else "ctco", kind, item) | {"output": output}


def _of_call(prefix: str, kind: str, item: FunctionCallInput | CustomCallInput | CallOutputInput) -> dict[str, Any]:
    """The fields that calls and their outputs share."""
    return {
        "id": item.id or new_id(prefix),
        "type": kind,
        "status": item.status or "completed",
        "call_id": item.call_id,
    }


def _reasoning(where: str, kind: str, item: ReasoningInput) -> dict[str, Any]:
    texts = [
        _text(f"{where}.{name}[{number}]", part, {part_type: "text"})
        for name, part_type, parts in (
            ("summary", "summary_text", item.summary),
            ("content", "reasoning_text", item.content),
        )
        for number, part in enumerate(parts or [])
    ]
    thinking = texts[len(item.summary or []) :]
    if item.encrypted_content is not None:
        unsealed = _unsealed(where, item.encrypted_content)
        thinking = thinking or [unsealed]
    return {
        "id": item.id or new_id("rs"),
        "type": kind,
        "status": item.status or "completed",
        "summary": [{"type": "summary_text", "text": text} for text in texts[: len(item.summary or [])]],
        "content": [{"type": "reasoning_text", "text": text} for text in thinking],
    }


def item_schema() -> dict[str, Any]:
    """The JSON schema of the items of a request."""
    reference = {"type": {"anyOf": [{"const": "item_reference"}, {"type": "null"}]}, "id": {"type": "string"}}
    schemas: list[dict[str, Any]] = []
    for kind, (struct, _, _) in _KINDS.items():
        own = msgspec.json.schema(struct)["$defs"][struct.__name__]
        is_named = kind != "message"  # its type may be left out
        kinds: dict[str, Any] = {"const": kind} if is_named else {"anyOf": [{"const": kind}, {"type": "null"}]}
        required = [*own.get("required", []), *(["type"] if is_named else [])]
        title = "".join(word.title() for word in kind.split("_"))
        schemas.append(own | {"title": f"{title}Input", "required": required})
        schemas[-1]["properties"] = own["properties"] | {"type": kinds}
    schemas.append({"type": "object", "title": "ItemReference", "properties": reference, "required": ["id"]})
    return {"anyOf": schemas}


class _Kind(NamedTuple):
    struct: type[Any]
    refused: Mapping[str, Refusal]
    form: Callable[[str, str, Any], dict[str, Any]]


_KINDS = {
    "message": _Kind(InputMessage, {}, _message),
    "function_call": _Kind(FunctionCallInput, _CALL_REFUSALS, _function_call),
    "function_call_output": _Kind(CallOutputInput, _CALL_REFUSALS, _call_output),
    "custom_tool_call": _Kind(CustomCallInput, _CALL_REFUSALS, _custom_call),
    "custom_tool_call_output": _Kind(CallOutputInput, _CALL_REFUSALS, _call_output),
    "reasoning": _Kind(ReasoningInput, {}, _reasoning),
}
