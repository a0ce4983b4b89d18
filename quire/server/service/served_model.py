"""The model as the front end knows it: its text, its name and its limits."""

from dataclasses import dataclass
from functools import cached_property

from quire.errors import InvalidRequest, ModelNotFound, PromptTooLong, shown
from quire.files.generation_defaults import GenerationDefaults
from quire.text.chat import ChatTemplates
from quire.text.tokenizer import Tokenizer

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

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model."""
        if name is not None and name not in self.known_as:
            raise ModelNotFound.for_field("model", f"{shown(name)} does not exist; this server has {self.name!r}")

    def room_after(self, num_prompt: int, field: str = "prompt") -> int:
        """Tokens that can be generated after a prompt, the value of `field`: at least 1."""
        room = self.max_total_tokens - num_prompt
        if room < 1:
            raise PromptTooLong.for_field(
                field,
                f"has {num_prompt} tokens, which leaves no room for an answer; the limit is "
                f"{self.max_total_tokens} for both",
            )
        return room

    def check_prompt(self, prompt: tuple[int, ...] | list[int], field: str = "prompt") -> None:
        """Refuse a prompt, the value of `field`, that is empty or too long."""
        if not prompt:
            raise InvalidRequest.for_field(field, "is empty; it must have at least 1 token")
        if len(prompt) > self.max_input_tokens:
            raise PromptTooLong.for_field(field, f"has {len(prompt)} tokens; the limit is {self.max_input_tokens}")
