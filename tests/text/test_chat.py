"""Chat templates: what they are given, where they come from, and how they fail."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidCheckpoint, InvalidRequest
from quire.text.chat import ChatTemplate, load_chat_templates
from tests.text.conversations import CONVERSATIONS, WEATHER, call, said
from tests.text.gguf_files import write_gguf
from tests.text.templates import TEMPLATES

HI = [said("user", "Hi")]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, Any]] = HI, **options: Any) -> str:
    return ChatTemplate(source, special_tokens=NAMES, now=lambda: datetime(2026, 5, 1)).render(messages, **options)


def test_known_forms_give_known_prompts() -> None:
    assert render(TEMPLATES["chatml"]) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(TEMPLATES["zephyr"]) == "<|user|>\nHi</s>\n<|assistant|>\n"
    assert render(TEMPLATES["gemma"]) == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert render(TEMPLATES["phi3"], add_generation_prompt=False) == "<|user|>\nHi<|end|>\n</s>"
    assert render(TEMPLATES["llama3"]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 01 May 2026\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_lines_that_hold_a_block_alone_leave_nothing() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_tools_are_written_as_json_with_their_unicode() -> None:
    prompt = render(TEMPLATES["qwen2.5"], tools=[WEATHER])
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt
    assert "東京" in prompt


def test_arguments_of_a_call_reach_the_template_as_an_object() -> None:
    for arguments in ('{"town": "Zürich"}', {"town": "Zürich"}):
        messages = [*HI, said("assistant", "", tool_calls=[call("get_weather", arguments)])]
        assert '{"name": "get_weather", "arguments": {"town": "Zürich"}}' in render(TEMPLATES["qwen2.5"], messages)
    messages = [*HI, said("assistant", "", tool_calls=[call("clock", "")])]
    assert '"arguments": {}' in render(TEMPLATES["qwen2.5"], messages)


@pytest.mark.parametrize("arguments", ["{", "[1]", "3"])
def test_arguments_that_are_not_an_object_are_refused_by_their_place(arguments: str) -> None:
    messages = [*HI, said("assistant", "", tool_calls=[call("clock", {}), call("clock", arguments)])]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[1\]\.function\.arguments"):
        render(TEMPLATES["qwen2.5"], messages)


def test_rendering_does_not_change_what_it_was_given() -> None:
    messages = [*HI, said("assistant", [{"type": "text", "text": "a"}], tool_calls=[call("clock", "{}")])]
    before = json.dumps(messages)
    for name in ("qwen2.5", "gemma3"):
        render(TEMPLATES[name], messages, add_generation_prompt=False, continue_final_message=name == "gemma3")
    assert json.dumps(messages) == before


def test_parts_reach_templates_that_read_them_and_are_joined_for_the_others() -> None:
    messages = CONVERSATIONS["parts"]["messages"]
    assert ChatTemplate(TEMPLATES["gemma3"]).takes_parts
    assert "user\nWhat isthis?<end" in render(TEMPLATES["gemma3"], messages)  # it trims each
    assert not ChatTemplate(TEMPLATES["chatml"]).takes_parts
    assert "user\n What is this? <|im_end|>" in render(TEMPLATES["chatml"], messages)


def test_text_reaches_templates_that_read_parts_alone_as_a_part() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert render(source) == "[text:Hi]"


def test_a_part_that_is_not_text_is_refused_by_its_place() -> None:
    messages = [said("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]: 'image_url'"):
        render(TEMPLATES["chatml"], messages)


def test_a_message_is_continued_where_it_ends() -> None:
    messages = [*HI, said("assistant", "The capital is ")]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TEMPLATES["chatml"], messages, **options).endswith("assistant\nThe capital is ")
    # This one trims its messages, so it would not have kept the space.
    assert render(TEMPLATES["gemma"], messages, **options).endswith("model\nThe capital is")


@pytest.mark.parametrize(
    ("source", "messages", "options", "says"),
    [
        (TEMPLATES["chatml"], [], {}, "messages: empty"),
        (TEMPLATES["chatml"], HI, {"continue_final_message": True}, "continue_final_message and add_generation_prompt"),
        (
            TEMPLATES["chatml"],
            [*HI, said("assistant", None)],
            {"continue_final_message": True, "add_generation_prompt": False},
            r"messages\[1\] has no text to continue",
        ),
        ("x", HI, {"continue_final_message": True, "add_generation_prompt": False}, "leaves the last message out"),
        (
            TEMPLATES["chatml"],
            HI,
            {"variables": {"a": 1, "add_generation_prompt": False}},
            "chat_template_kwargs has add_generation_prompt",
        ),
        (TEMPLATES["chatml"], ["Hi"], {}, r"messages\[0\]: a str"),
        (TEMPLATES["chatml"], [said("user", b"Hi")], {}, r"messages\[0\]\.content: a bytes"),
    ],
)
def test_a_request_that_cannot_be_rendered_is_refused(
    source: str, messages: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        render(source, messages, **options)


def test_what_a_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(InvalidRequest) as raised:
        render(TEMPLATES["gemma"], CONVERSATIONS["system"]["messages"])
    assert str(raised.value) == "System role not supported"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\nb\n{{ messages[0].nothing.further }}", "line 3: .*has no attribute 'nothing'"),
        ("a\n{{ undefined_thing.x }}", "line 2: 'undefined_thing' is undefined"),
        ("a\n{{ 'x' + 1 }}", "line 2: can only concatenate str"),
        ("\n\n\n{{ messages[7] + 'x' }}", "line 4"),
        ("{{ 1 // 0 }}", "line 1: .*division"),
        ("a\n{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}", "line 3: .*recursion"),
        ("a\n{% include 'x' %}", "line 2: no loader"),
    ],
)
def test_a_template_that_fails_is_reported_with_its_name_and_line(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat template 'default', {says}"):
        render(source)


def test_an_undefined_variable_is_empty_where_it_is_merely_written_or_asked_for() -> None:
    assert render("[{{ nothing }}{% if nothing %}x{% endif %}{{ nothing is defined }}]") == "[False]"


def test_a_template_that_does_not_compile_is_reported_with_its_name_and_line() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"chat template 'rag', line 2: .*endfor"):
        ChatTemplate("a\n{% for x in y %}", name="rag")


def write_folder(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def loaded(model: Path, override: str | None = None) -> dict[str, str]:
    templates = load_chat_templates(model, {}, override=override)
    return {name: templates.select(name).source for name in templates.names}


def test_templates_are_found_wherever_models_keep_them(tmp_path: Path) -> None:
    assert loaded(tmp_path) == {}
    write_folder(tmp_path, tokenizer_config={"chat_template": "config"})
    assert loaded(tmp_path) == {"default": "config"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert loaded(tmp_path) == {"default": "d", "tool_use": "t"}
    write_folder(tmp_path, chat_template={"chat_template": "own file"})
    assert loaded(tmp_path) == {"default": "own file", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("jinja\n", encoding="utf-8")
    assert loaded(tmp_path) == {"default": "jinja\n"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag é", encoding="utf-8")
    assert loaded(tmp_path) == {"default": "jinja\n", "rag": "rag é"}


def test_a_given_template_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": "config"})
    file = tmp_path / "mine.jinja"
    file.write_text("mine", encoding="utf-8")
    assert loaded(tmp_path, str(file)) == {"default": "mine"}
    assert loaded(tmp_path, "{{ messages }}") == {"default": "{{ messages }}"}
    with pytest.raises(InvalidCheckpoint, match=r"nowhere\.jinja: cannot be read"):
        loaded(tmp_path, "nowhere.jinja")
    with pytest.raises(InvalidCheckpoint, match="the given template: chat template 'default', line 1"):
        loaded(tmp_path, "{% if %}")


def test_templates_of_a_gguf_file_are_found_by_name(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata | {"tokenizer.chat_templates": ["tool_use"]})
    assert loaded(path) == {"default": "d", "tool_use": "t"}


def test_a_configuration_that_holds_no_template_is_reported_by_file(tmp_path: Path) -> None:
    for wrong in (3, [1], [{"name": "x"}]):
        write_folder(tmp_path, tokenizer_config={"chat_template": wrong})
        with pytest.raises(InvalidCheckpoint, match=r"tokenizer_config\.json: chat_template"):
            loaded(tmp_path)


def test_a_template_is_selected_by_name_or_by_need(tmp_path: Path) -> None:
    named = {"default": "d", "tool_use": "t", "rag": "r"}
    templates = load_chat_templates(write_folder(tmp_path, tokenizer_config={"chat_template": named}), {})
    assert templates.select().source == "d"
    assert templates.select(with_tools=True).source == "t"
    assert templates.select("rag", with_tools=True).source == "r"
    with pytest.raises(InvalidRequest, match="'nope' does not exist; the model has default, tool_use, rag"):
        templates.select("nope")


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_chat_templates(tmp_path, {}).select()
