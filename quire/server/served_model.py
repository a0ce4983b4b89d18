"""The model as the front end knows it: its text, its name and its limits."""

from dataclasses import dataclass
from functools import cached_property

from quire.errors import InvalidRequest, PromptTooLong
from quire.files.generation_defaults import GenerationDefaults
from quire.files.model_files import ModelFiles
from quire.text.chat import ChatTemplates, load_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer

# Names that clients send when they do not know the model's own.
ANY_MODEL = frozenset({"", "default", "tgi", "dummy"})


@dataclass(frozen=True)
class ServedModel:
    """Fixed once made. `max_total_tokens` bounds prompt and answer together, `max_input_tokens` the prompt."""

    name: str
    tokenizer: Tokenizer
    templates: ChatTemplates
    end_ids: tuple[int, ...]
    defaults: GenerationDefaults
    max_total_tokens: int
    max_input_tokens: int
    created: int = 0  # seconds since 1970

    @cached_property
    def known_as(self) -> frozenset[str]:
        return ANY_MODEL | {self.name}

    def default_max_tokens(self, num_prompt: int) -> int:
        """How much may be generated when the request does not say."""
        room = self.max_total_tokens - num_prompt
        stated = self.defaults.max_new_tokens
        return max(0, room if stated is None else min(room, stated))

    def check_prompt(self, prompt: tuple[int, ...] | list[int]) -> None:
        if not prompt:
            raise InvalidRequest("prompt is empty; it must have at least 1 token")
        if len(prompt) > self.max_input_tokens:
            raise PromptTooLong(f"prompt has {len(prompt)} tokens; the limit is {self.max_input_tokens}")


def served_model(
    files: ModelFiles,
    *,
    max_total_tokens: int,
    max_input_tokens: int | None = None,
    name: str | None = None,
    chat_template: str | None = None,
    created: int = 0,
) -> ServedModel:
    """From a model's files."""
    if files.tokenizer is None:
        raise InvalidRequest(f"{files.name} has no tokenizer; it can be benchmarked, not served")
    tokenizer = load_tokenizer(files.tokenizer)
    return ServedModel(
        name=name or files.name,
        tokenizer=tokenizer,
        templates=load_chat_templates(files.tokenizer, tokenizer.special_tokens, override=chat_template),
        end_ids=files.eos_token_ids,
        defaults=files.generation,
        max_total_tokens=max_total_tokens,
        max_input_tokens=min(max_input_tokens or max_total_tokens, max_total_tokens),
        created=created,
    )
