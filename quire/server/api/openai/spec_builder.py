"""The fields of an OpenAI request as specs for the service."""

from quire.errors import invalid
from quire.request import MAX_PRIORITY, Request
from quire.server.api.dialect import Dialect
from quire.server.api.openai.requests import ChatRequest, SamplingFields
from quire.server.api.sampling import at_most, between, sampling_params, seed_of
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.served_model import ServedModel
from quire.server.settings import ServerSettings
from quire.text.stop_strings import check_stops

MAX_STOP_IDS = 1024
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias",
)  # fmt: skip


class SpecBuilder:
    """Makes the specs of one request's prompts. The fields that all of them share are checked once."""

    def __init__(
        self,
        fields: SamplingFields,
        model: ServedModel,
        settings: ServerSettings,
        dialect: Dialect,
        arrival: Arrival,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        samples: int,
        prompt_logprobs: int | None = None,
        limit_field: str = "max_tokens",
    ) -> None:
        self._adapter = model.adapter_of(fields.model)
        self._fields = fields
        self._prompt_field = "messages" if isinstance(fields, ChatRequest) else "prompt"
        self._model = model
        self._dialect = dialect
        self._defaults = dialect.defaults(model)
        self._max_tokens = max_tokens
        self._limit_field = limit_field
        self._samples = samples
        self._prompt_logprobs = prompt_logprobs
        self._seed = seed_of(fields.seed)
        self._stop_ids = tuple(fields.stop_token_ids or ())
        at_most("the number of stop_token_ids", len(self._stop_ids), MAX_STOP_IDS, param="stop_token_ids")
        model.tokenizer.check_ids(self._stop_ids, param="stop_token_ids")
        self._stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
        check_stops(self._stop, settings.max_stop_sequences)
        between("n", samples, 1, settings.max_best_of)
        between("priority", fields.priority or 0, -MAX_PRIORITY, MAX_PRIORITY)
        least = settings.min_priority(arrival.key_name)
        if fields.priority is not None and least is not None and fields.priority < least:
            raise invalid(
                "priority",
                f"is {fields.priority}; with the API key {arrival.key_name!r} it must be at least {least}, its "
                "min_priority (lower runs first)",
            )
        options = fields.stream_options
        if options is not None and not fields.stream:
            asked = [name for name in options.__struct_fields__ if getattr(options, name)]
            if asked:
                raise invalid("stream_options", f"has {asked[0]}; it needs stream to be true")
        given = {name: getattr(fields, name) for name in _SAMPLING} | {"logprobs": logprobs}
        self._sampling = sampling_params(given, self._defaults, model.tokenizer)

    def spec(self, tokens: list[int], prompt_field: str | None = None) -> GenerationSpec:
        """The spec of a prompt. `prompt_field` is its name in errors, where it is one of several."""
        model, fields, dialect = self._model, self._fields, self._dialect
        prompt_field = prompt_field or self._prompt_field
        model.check_prompt(tokens, prompt_field)
        max_tokens = self._max_tokens
        if max_tokens is None:
            max_tokens = model.room_after(len(tokens), prompt_field)
            if self._defaults.max_new_tokens is not None:
                max_tokens = max(1, min(max_tokens, self._defaults.max_new_tokens))
        model.check_total(len(tokens), max_tokens, self._limit_field)
        min_tokens = fields.min_tokens or 0
        at_most("min_tokens", min_tokens, max_tokens)
        return GenerationSpec(
            Request(
                request_id=0,
                prompt=tuple(tokens),
                max_tokens=max_tokens,
                sampling=self._sampling,
                seed=self._seed,
                samples=self._samples,
                min_tokens=min_tokens,
                end_ids=model.end_ids,
                ignore_end=bool(fields.ignore_eos),
                stop_ids=self._stop_ids,
                priority=fields.priority or 0,
                salt=fields.cache_salt or "",
                prompt_logprobs=self._prompt_logprobs,
                adapter=self._adapter,
            ),
            draws_seed=fields.seed is None,
            stop=self._stop,
            include_stop=bool(fields.include_stop_str_in_output) or dialect.includes_stop,
            skip_special_tokens=fields.skip_special_tokens is not False,
            stop_search=dialect.stop_search,
            length_first=dialect.length_first,
        )
