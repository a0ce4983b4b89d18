"""Calls and results of earlier turns reach every template."""

import json
import re

import pytest

from quire.text.call_history import ToolPlace
from quire.text.chat import ChatTemplate
from quire.text.conversation import render_conversation
from quire.text.shield import Shield
from quire.text.tools import DEEPSEEK, PART_BEGIN, PHI4, SECTION_BEGIN, SEPARATOR, format_of
from tests.text.templates import TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = [name for name in TEMPLATES if name != "oddments"]


def call(number: int, **arguments: str) -> dict[str, object]:
    written = {"name": f"look_{number}", "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": written}


def result(number: int, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def rendered(name: str, *messages: dict[str, object], **options: object) -> str:
    template = ChatTemplate(TEMPLATES[name], special_tokens=TOKENS)
    asked = {"role": "user", "content": "how is it there"}
    return render_conversation(template, Shield(["<|im_end|>"]), [asked, *messages], **options).text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
def test_calls_without_text_stay_in_the_prompt(name, content):
    """As openai-agents sends a handoff, and pydantic-ai and LangChain their histories; no tools are active."""
    turn = {"role": "assistant", "tool_calls": [call(1, city="Rome")], **content}
    text = rendered(name, turn, result(1, "sunny"), {"role": "assistant", "content": "fine"})
    assert "look_1" in text
    assert "Rome" in text
    assert "sunny" in text
    assert "None" not in text


@pytest.mark.parametrize("name", NAMES)
def test_text_beside_calls_stays_in_the_prompt_too(name):
    turn = {"role": "assistant", "content": "i see to it", "tool_calls": [call(1, city="Rome")]}
    text = rendered(name, turn, result(1, "sunny"), {"role": "assistant", "content": "fine"})
    assert re.search("i see to it.*look_1.*Rome.*sunny.*fine", text, re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_and_their_results_are_in_the_prompt(name):
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1, city="Rome"), call(2, city="Oslo")]}
    turns = [turn, result(1, "sunny"), result(2, "snow"), {"role": "assistant", "content": "so so"}]
    text = rendered(name, *turns)
    for word in ("look_1", "Rome", "look_2", "Oslo", "sunny", "snow", "so so"):
        assert word in text


@pytest.mark.parametrize("name", ["gemma", "gemma3"])
def test_results_as_text_leave_the_turns_in_their_order(name):
    """The templates refuse two turns of one role."""
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
    text = rendered(name, turn, result(1, "sunny"), result(2, "snow"), {"role": "user", "content": "and now"})
    assert re.search("sunny.*snow.*and now", text, re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_tools", [False, True])
def test_the_user_may_go_on_after_a_result(name, has_tools):
    """As coding agents do, which send reminders beside results; Mistral's and Gemma's want roles to alternate."""
    if has_tools and name == "gemma":
        pytest.skip("it has no system message, in which tools could be listed")
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
    turns = [turn, result(1, "sunny"), result(2, "snow"), {"role": "user", "content": "and now"}]
    text = rendered(name, *turns, tools=[WEATHER] if has_tools else None)
    assert re.search("sunny.*snow.*and now", text, re.DOTALL)


def test_calls_that_stand_alone_come_before_their_results():
    """Llama 3 takes one call in a message."""
    turn = {"role": "assistant", "content": "", "tool_calls": [call(1, city="Rome"), call(2, city="Oslo")]}
    text = rendered("llama3", turn, result(2, "snow"), result(1, "sunny"))
    assert re.search("look_1.*sunny.*look_2.*snow", text, re.DOTALL)


def test_ids_have_the_length_that_a_template_insists_on():
    turn = {"role": "assistant", "tool_calls": [call(1, city="Rome")]}
    text = rendered("mistral", turn, result(1, "sunny"))
    assert re.search(r'"id": "[A-Za-z0-9]{9}"', text)
    own = {**turn, "tool_calls": [{**call(1), "id": "a2b4c6d8e"}]}
    assert '"id": "a2b4c6d8e"' in rendered("mistral", own, {**result(1, "sunny"), "tool_call_id": "a2b4c6d8e"})


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_list_of_calls_is_none(name):
    plain = {"role": "assistant", "content": "fine"}
    assert rendered(name, {**plain, "tool_calls": []}) == rendered(name, {**plain, "tool_calls": None})
    assert rendered(name, {**plain, "tool_calls": []}) == rendered(name, plain)


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_calls_of_custom_tools_are_calls_of_their_input(name):
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
    text = rendered(name, {"role": "assistant", "content": None, "tool_calls": [custom]}, result(1, "a.txt"))
    assert re.search(r'"shell".*"input": "ls -l".*a\.txt', text, re.DOTALL)


NAMED_RESULTS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}call:{{ c.function.name }}"
    "{{ c.function.arguments }}{% endfor %}{% elif m.role == 'tool' %}{{ 'response:' + m.name }}({{ m.content }})"
    "{% else %}{{ m.role }}:{{ m.content }}{% endif %}\n{% endfor %}"
)


def test_results_have_the_names_of_their_functions():
    """Clients of the OpenAI API send the id of the call only."""
    template = ChatTemplate(NAMED_RESULTS)
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
    named = {**result(1, "snow"), "name": "another"}
    messages = [{"role": "user", "content": "so?"}, turn, result(2, "rain"), result(1, "sun"), named]
    text = render_conversation(template, None, messages).text
    assert re.findall(r"response:[^)]+\)", text) == [
        "response:look_2(rain)",
        "response:look_1(sun)",
        "response:another(snow)",
    ]


def test_results_as_text_are_not_said_by_the_function():
    template = ChatTemplate("{% for m in messages %}[{{ m.name or m.role }}] {{ m.content }}{% endfor %}")
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1)]}
    text = render_conversation(template, None, [{"role": "user", "content": "so?"}, turn, result(1, "sun")]).text
    assert "[user] <tool_response>" in text


WEATHER = {"type": "function", "function": {"name": "weather_there", "parameters": {"type": "object"}}}
IN_MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if 'tools' in m %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}"
    "\n{% endfor %}"
)


def with_tools(source: str, *messages: dict[str, object]) -> tuple[ChatTemplate, str]:
    template = ChatTemplate(source, special_tokens=TOKENS)
    asked = {"role": "user", "content": "how is it there"}
    return template, render_conversation(template, None, [*messages, asked], tools=[WEATHER]).text


def test_the_place_of_tools_is_found_by_rendering_them():
    template, text = with_tools(TEMPLATES["qwen2.5"])
    assert template.tool_place is ToolPlace.VARIABLE
    assert "weather_there" in text
    template, text = with_tools("{# xml_tools are other tools #}" + TEMPLATES["chatml"])  # as SmolLM3's template has it
    assert template.tool_place is None
    assert "You can call functions." in text
    assert "weather_there" in text


CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}"


def test_a_template_that_insists_on_tools_renders_calls_beside_them():
    """As those of Hermes models do."""
    source = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        + "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    )
    template = ChatTemplate(source + CALLS + "\n{% endfor %}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call(1)]}]
    turns.append(result(1, "sunny"))
    assert "assistant: <call>look_1tool: sunny" in render_conversation(template, None, turns, tools=[WEATHER]).text


def test_a_template_with_sections_of_calls_is_told_of_tools_in_its_own_words():
    """As DeepSeek's templates, which render calls and no tools."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}{# " + SECTION_BEGIN + " #}"
    )
    template = ChatTemplate(source)
    assert template.tool_place is None
    assert template.call_format is DEEPSEEK
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call(1)]}]
    text = render_conversation(template, None, [*turns, result(1, "sunny")], tools=[WEATHER]).text
    assert f"{SECTION_BEGIN}{PART_BEGIN}the name{SEPARATOR}{{" in text
    assert "assistant: <call>look_1tool: sunny" in text


def test_tools_are_told_to_templates_without_a_system_message_too():
    """As Gemma 2's, which refuses one."""
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATES["chatml"]
    )
    _, text = with_tools(refusing)
    assert re.search("user.You can call functions.*weather_there.*how is it there", text, re.DOTALL)


def test_tools_in_the_system_message_are_json():
    """As Phi-4-mini's template has it."""
    for system in ({"role": "system", "content": "be brief"}, None):
        template, text = with_tools(IN_MESSAGES, *([system] if system else []))
        assert template.tool_place is ToolPlace.SYSTEM_MESSAGE
        content = "be brief" if system else ""
        assert text.startswith(f'system: {content}<|tool|>[{{"name": "weather_there", "parameters"')
        assert format_of(template.source) is PHI4


def test_special_tokens_in_calls_that_become_text_are_text():
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1, city="<|im_end|>")]}
    template = ChatTemplate(TEMPLATES["gemma"], special_tokens=TOKENS)
    asked = {"role": "user", "content": "how is it there"}
    prompt = render_conversation(template, Shield(["<|im_end|>"]), [asked, turn, result(1, "sunny")])
    assert "<|im_end|>" in prompt.text
    assert prompt.standing is not None
    assert "<|im_end|>" in prompt.standing
