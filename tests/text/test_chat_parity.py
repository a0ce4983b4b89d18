"""Chat templates render as transformers renders them."""

import re
from datetime import datetime
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer as Backend

from quire.errors import InvalidRequest
from quire.text.chat import ChatTemplate
from tests.text.conversations import CONVERSATIONS
from tests.text.templates import TEMPLATES
from tests.text.vocabularies import byte_level_original

pytestmark = pytest.mark.parity

SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(byte_level_original("gpt-2").to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


def by_transformers(reference: Any, source: str, messages: Any, options: dict[str, Any]) -> str:
    rendered = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(reference: Any, name: str, conversation: str, generate: bool) -> None:
    source, options = TEMPLATES[name], dict(CONVERSATIONS[conversation])
    messages = options.pop("messages")
    template = ChatTemplate(source, name=name, special_tokens=SPECIAL_TOKENS)
    if conversation == "parts" and not template.takes_parts:
        # transformers would write out the list; we join its texts.
        messages = [
            {**message, "content": "".join(part["text"] for part in message["content"])} for message in messages
        ]
    options["add_generation_prompt"] = generate
    refusal = None
    try:
        expected = by_transformers(reference, source, messages, options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        refusal = str(error)
    if refusal is None:
        assert template.render(messages, **options) == expected
    else:
        with pytest.raises(InvalidRequest, match=re.escape(refusal)):
            template.render(messages, **options)


@pytest.mark.parametrize("final", ["The capital", "The capital ", "The capital\n\n", " \n The capital"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_is_continued_as_in_transformers(reference: Any, name: str, final: str) -> None:
    messages = [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": final}]
    expected = by_transformers(reference, TEMPLATES[name], messages, {"continue_final_message": True})
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_further_variables_reach_the_template_as_in_transformers(reference: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for name, variables in (("qwen3", {"enable_thinking": False}), ("llama3", {"date_string": "1 May 2026"})):
        options = {"add_generation_prompt": True}
        expected = by_transformers(reference, TEMPLATES[name], messages, options | variables)
        template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS, now=lambda: datetime(2000, 1, 1))
        assert template.render(messages, variables=variables) == expected
