"""The model of the server: its text, its name and its limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quire.errors import InvalidRequest, ModelNotFound, PromptTooLong, invalid, listed, shown
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
    max_guesses: int = 0  # in one step of a sequence; 0 where nothing is guessed
    # Folders by name. Changes as adapters come and go.
    adapters: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def known_as(self) -> frozenset[str]:
        return ANY_MODEL | {self.name}

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model."""
        self.adapter_of(name)

    def adapter_of(self, name: str | None, field: str = "model") -> str | None:
        """The adapter called `name`; None for a name of the model itself. Other names are refused."""
        if name is None or name in self.known_as:
            return None
        if name not in self.adapters:
            raise self.not_found(name, field)
        return name

    def name_in_answers(self, name: str | None) -> str:
        """The model name in answers to a request that uses `name`."""
        return self.adapter_of(name) or self.name

    def not_found(self, name: str, field: str = "model") -> InvalidRequest:
        adapters = f", and the adapters {listed(sorted(self.adapters))}" if self.adapters else ""
        return invalid(field, f"{shown(name)} does not exist; this server has {self.name!r}{adapters}", ModelNotFound)

    @property
    def _context_length(self) -> str:
        """OpenAI's wording. Clients recognise it, or "prompt is too long", and switch to another model."""
        return f"This model's maximum context length is {self.max_total_tokens} tokens."

    def check_prompt(self, prompt: Sequence[int], field: str = "prompt") -> None:
        """Refuse a prompt, made from `field` among others, that is empty or too long."""
        if not prompt:
            raise invalid(field, "is empty; it must have at least 1 token")
        if len(prompt) > self.max_input_tokens:
            problem = f"the prompt is too long: it has {len(prompt)} tokens; the limit is {self.max_input_tokens}"
            error = PromptTooLong(f"{problem}. {self._context_length}", param=field)
            error.counts = (len(prompt), self.max_input_tokens)
            raise error

    def room_after(self, num_prompt: int, field: str) -> int:
        """Tokens that can be generated after a prompt, made from `field` among others: at least 1."""
        room = self.max_total_tokens - num_prompt
        if room < 1:
            problem = f"the prompt is too long: it has {num_prompt} tokens, which leaves no room for an answer"
            limit = f"the limit is {self.max_total_tokens} for both"
            error = PromptTooLong(f"{problem}; {limit}. {self._context_length}", param=field)
            error.counts = (num_prompt, self.max_total_tokens - 1)
            raise error
        return room

    def check_total(self, num_prompt: int, max_tokens: int, field: str) -> None:
        """Refuse more tokens, by the value of `field`, than fit after a prompt."""
        total = num_prompt + max_tokens
        if total > self.max_total_tokens:
            problem = f"is {max_tokens}, the prompt has {num_prompt} tokens, together {total}; the limit is "
            raise invalid(field, f"{problem}{self.max_total_tokens}. {self._context_length}", PromptTooLong)
