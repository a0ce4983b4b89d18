"""Chat templates: they render conversations as prompts."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2

from quire.errors import InvalidCheckpoint, InvalidRequest, TemplateFailed, invalid, shown
from quire.files.json_file import read_json_if_present
from quire.files.regular_file import read_regular_text
from quire.text.budget import Budget
from quire.text.call_history import CallSupport, ToolPlace, call_support, tool_place
from quire.text.json_text import parse_json_text
from quire.text.message_fields import check_fields
from quire.text.plain_data import plain_copy, size_of
from quire.text.sandbox import RefusedByTemplate, TemplateEnvironment
from quire.text.tools import HERMES, CallFormat, CallStyle, format_of

Message = Mapping[str, Any]

DEFAULT = "default"
_TOOL_USE = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Errors that templates can raise. They come with models and are not trusted.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

# Ends in a space: where it is lost, the template trims its input.
_CONTINUED = "\ue000the answer goes on here\ue001 "
_PROBE = "\ue000probe\ue001"


class ChatTemplate:
    """One template, compiled. Any thread may render it; a rendering changes nothing.

    `special_tokens` (`bos_token`, ...) are variables of every rendering.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = DEFAULT,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not isinstance(source, str):  # metadata of a file has values of any type
            raise InvalidCheckpoint(f"chat template {name!r} is {shown(source)}, not a text")
        self.name = name
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._environment = TemplateEnvironment(now)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidCheckpoint(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise InvalidCheckpoint(f"chat template {name!r}: nested too deeply to compile") from error
        self.takes_parts = self._can_render([{"type": "text", "text": _PROBE}])
        self.takes_text = self._can_render(_PROBE)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with its special tokens written out: encode it without adding any.

        Messages are as the OpenAI API has them; `variables` are further names for the template.

        `continue_final_message`: the prompt ends with the last message, open, instead of inviting a new one.
        """
        if not messages:
            raise invalid("messages", ": empty; a conversation has at least 1 message")
        if continue_final_message and add_generation_prompt:
            raise invalid("continue_final_message", "and add_generation_prompt cannot both be true")
        conversation = [self._message(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_final(conversation)
        own = {
            "messages": conversation,
            "tools": None if tools is None else plain_copy("tools", tools),
            "documents": None if documents is None else plain_copy("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        taken = own.keys() & (variables or {}).keys()
        if taken:
            raise invalid("chat_template_kwargs", f"has {min(taken)}, which is a field of the request itself")
        prompt = self._render({**self._special_tokens, **plain_copy("chat_template_kwargs", variables or {}), **own})
        return self._up_to_mark(prompt) if continue_final_message else prompt

    def _render(self, variables: Mapping[str, Any]) -> str:
        budget = Budget(size_of(variables))
        try:
            return self._environment.render(self._template, variables, budget)
        except RefusedByTemplate as error:
            raise TemplateFailed(str(error)) from error
        except _FAILURES as error:
            line = self._line_of(error.__traceback__)
            raise TemplateFailed(f"chat template {self.name!r}, line {line}: {error}") from error

    def _line_of(self, traceback: TracebackType | None) -> int:
        """The innermost template line that the error passed through."""
        line = 1
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == "<template>":
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return line

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        """A message in the form this template reads."""
        if not isinstance(message, Mapping):
            raise invalid(f"messages[{index}]", f": a {type(message).__name__}, not an object")
        check_fields(f"messages[{index}]", message)
        plain: dict[str, Any] = plain_copy(f"messages[{index}]", message)
        content = plain.get("content")
        if isinstance(content, list) and not self.takes_parts:
            plain["content"] = "".join(_part_text(f"messages[{index}].content[{i}]", p) for i, p in enumerate(content))
        elif isinstance(content, str) and self.takes_parts and not self.takes_text:
            plain["content"] = [{"type": "text", "text": content}]
        _parse_calls(index, plain)
        reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
        if reasoning is not None:
            plain |= {"reasoning_content": reasoning, "thinking": plain.get("thinking", reasoning)}
        return plain

    @cached_property
    def call_support(self) -> dict[bool, CallSupport]:
        """The call messages that it renders, with and without tools."""
        return {has: call_support(self.source, self.render, has_tools=has) for has in (True, False)}

    @cached_property
    def call_format(self) -> CallFormat:
        """The call format of its model, or the one to request where the template does not render tools."""
        form = format_of(self.source)
        return HERMES if self.tool_place is None and form.style is not CallStyle.SECTIONS else form

    @cached_property
    def takes_system(self) -> bool:
        """False if it refuses a system message, or leaves it out."""
        try:
            return _PROBE in self.render([{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}])
        except InvalidRequest:
            return False

    @cached_property
    def tool_place(self) -> ToolPlace | None:
        """The place from which it reads tools; None if it renders none."""
        return tool_place(self.render)

    def _can_render(self, content: Any) -> bool:
        """True if a user message with this content is rendered as its text, without its structure."""
        conversation = [{"role": "user", "content": content}]
        try:
            prompt = self._render({**self._special_tokens, "messages": conversation, "tools": None, "documents": None})
        except InvalidRequest:
            return False
        return _PROBE in prompt and f"'{_PROBE}'" not in prompt and f'"{_PROBE}"' not in prompt

    def _up_to_mark(self, prompt: str) -> str:
        at = prompt.rfind(_CONTINUED.rstrip())
        if at < 0:
            raise invalid(
                "continue_final_message", f": chat template {self.name!r} leaves the last message out of the prompt"
            )
        kept = prompt[at:].startswith(_CONTINUED)
        return prompt[:at] if kept else prompt[:at].rstrip()


class ChatTemplates:
    """The templates of a model by name, `default` first among them."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = dict(templates)

    @property
    def names(self) -> list[str]:
        return list(self._templates)

    @cached_property
    def words(self) -> frozenset[str]:
        """All words in the sources. A key of a message that is not among them is read by no template."""
        return frozenset(word for one in self._templates.values() for word in re.findall(r"\w+", one.source))

    def select(self, name: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """The template of that name; unnamed, the one for tools when there are tools and one is made for them."""
        if not self._templates:
            raise TemplateFailed(
                "the model has no chat template; give one with --chat-template, or send a plain prompt"
            )
        if name is None:
            name = _TOOL_USE if with_tools and _TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequest(f"chat template {name!r} does not exist; the model has {', '.join(self._templates)}")
        return self._templates[name]


def load_chat_templates(
    model: str | Path,
    special_tokens: Mapping[str, str],
    *,
    override: str | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> ChatTemplates:
    """The templates of a Hugging Face folder or GGUF file.

    `override` takes the place of all of them: the path of a file, or a template itself, recognised by its braces.
    """
    model = Path(model)
    origin = str(model)
    if override is not None:
        origin, sources = "the given template", {DEFAULT: _given(override)}
    elif model.is_dir():
        sources = _folder_sources(model)
    else:
        from quire.files.gguf import read_metadata  # folders do not need it

        sources = gguf_template_sources(read_metadata(model))
    try:
        return ChatTemplates(
            {
                name: ChatTemplate(source, name=name, special_tokens=special_tokens, now=now)
                for name, source in sources.items()
            }
        )
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{origin}: {error}") from error


def gguf_template_sources(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name, as the metadata of a GGUF file has them."""
    key = "tokenizer.chat_template"
    sources = {DEFAULT: metadata[key]} if key in metadata else {}
    return sources | {
        name.removeprefix(f"{key}."): source for name, source in metadata.items() if name.startswith(f"{key}.")
    }


def _folder_sources(folder: Path) -> dict[str, str]:
    """Templates by name. For equal names the more specific file wins, as in transformers."""
    sources: dict[str, str] = {}
    for config in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        sources |= _named_sources(config, read_json_if_present(config).get("chat_template"))
    single = folder / "chat_template.jinja"
    if single.exists():
        # One file per template replaces whatever the configuration has.
        sources = {DEFAULT: _read(single)}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read(file)
    return sources


def _named_sources(file: Path, found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, dict):
        found = [{"name": name, "template": source} for name, source in found.items()]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise InvalidCheckpoint(f"{file}: chat_template is neither a string nor a list of name and template") from error


def _given(override: str) -> str:
    if "{{" in override or "{%" in override:
        return override
    return _read(Path(override))


def _read(file: Path) -> str:
    try:
        return read_regular_text(file)
    except OSError as error:
        raise InvalidCheckpoint(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidCheckpoint(f"{file}: not UTF-8: {error}") from error


def _part_text(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise invalid(where, f": {kind!r} is not supported by this model; supported is 'text'")
    return text


def _parse_calls(index: int, message: Message) -> None:
    for number, call in enumerate(message.get("tool_calls") or ()):
        _parse_arguments(f"messages[{index}].tool_calls[{number}]", call)


def _parse_arguments(where: str, call: dict[str, Any]) -> None:
    """The API sends arguments as the text of a JSON object; templates read the object."""
    if "custom" in call:
        return
    function, inside = (call["function"], f"{where}.function") if "function" in call else (call, where)
    if isinstance(function.get("arguments"), dict):
        return
    arguments = parse_json_text(f"{inside}.arguments", function.get("arguments") or "{}")
    if not isinstance(arguments, dict):
        raise invalid(f"{inside}.arguments", f": a JSON {type(arguments).__name__}, not an object")
    function["arguments"] = arguments


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of calls as objects."""
    parsed = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tool_calls"):
            check_fields(f"messages[{index}]", message)
            message = plain_copy(f"messages[{index}]", message)
            _parse_calls(index, message)
        parsed.append(message)
    return parsed


def _mark_final(conversation: list[dict[str, Any]]) -> None:
    final = conversation[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUED
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUED
            return
    raise invalid("continue_final_message", f": messages[{len(conversation) - 1}] has no text to continue")
