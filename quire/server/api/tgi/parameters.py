"""The parameters of /generate as specs for the service."""

from typing import Any, NamedTuple

from quire.errors import invalid
from quire.request import Request
from quire.server.api.grammars import grammar_of, with_grammar
from quire.server.api.sampling import between, sampling_params, seed_of
from quire.server.api.tgi.dialect import TGIDialect
from quire.server.api.tgi.requests import PARAMETER_REFUSALS, Parameters
from quire.server.api.validation import typed
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from quire.text.stop_strings import check_stops

_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "min_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class ParsedParameters(NamedTuple):
    parameters: Parameters
    unknown: list[str]  # parameters that the API does not know
    is_sampled: bool
    streams: bool


def parse_parameters(
    settings: ServerSettings,
    dialect: TGIDialect,
    given: dict[str, Any] | None,
    streams: bool = False,
    texts_only: bool = False,
) -> ParsedParameters:
    """`texts_only`: the route's answers have no details."""
    parameters, unknown = typed(
        given or {}, Parameters, PARAMETER_REFUSALS, strict=settings.strict, where="parameters."
    )
    is_sampled = given is None or _is_sampled(parameters)
    best_of = 1 if parameters.best_of is None else parameters.best_of
    between("best_of", best_of, 1, settings.max_best_of)
    if best_of > 1 and not _is_sampled(parameters):
        raise invalid("best_of", f"is {best_of}; without sampling all answers are the same")
    if best_of > 1 and streams:
        raise invalid("best_of", f"is {best_of}; answers that are chosen among cannot be streamed")
    if parameters.decoder_input_details and streams:
        raise invalid("decoder_input_details", "is true; it cannot be streamed")
    if parameters.max_new_tokens is not None and parameters.max_new_tokens < 1:
        raise invalid("max_new_tokens", f"is {parameters.max_new_tokens}; it must be at least 1")
    check_stops(parameters.stop or (), settings.max_stop_sequences)
    between("top_n_tokens", parameters.top_n_tokens or 0, 0, settings.max_top_n_tokens)
    dialect.check(parameters)
    if texts_only and not dialect.drops_details:
        for name in ("details", "decoder_input_details", "top_n_tokens"):
            value = getattr(parameters, name)
            if value:
                raise invalid(f"parameters.{name}", f"is {value}; this route answers with plain text")
    return ParsedParameters(parameters, unknown, is_sampled, streams)


def generation_spec(
    service: Service, dialect: TGIDialect, arrival: Arrival, inputs: str, parsed: ParsedParameters
) -> GenerationSpec:
    """The spec of one prompt."""
    model, settings = service.model, service.settings
    parameters = parsed.parameters
    if not inputs:
        raise invalid("inputs", "is empty; it must have at least 1 character")
    with arrival.tokenising():
        (tokens,) = model.tokenizer.encode_batch([inputs])
    if parameters.truncate is not None:
        between("truncate", parameters.truncate, 1, model.max_input_tokens)
        tokens = tokens[-parameters.truncate :]
    model.check_prompt(tokens, "inputs")
    max_tokens = parameters.max_new_tokens
    if max_tokens is None:
        max_tokens = model.room_after(len(tokens), "inputs")
    model.check_total(len(tokens), max_tokens, "max_new_tokens")
    given = {name: getattr(parameters, name) for name in (*_SAMPLING, *_PENALTIES)}
    has_details = bool(parameters.details or parameters.decoder_input_details)
    if parsed.streams or has_details or (parameters.best_of or 1) > 1:
        given["logprobs"] = parameters.top_n_tokens or 0
    if not parsed.is_sampled:
        given["temperature"] = 0.0
    scores_prompt = settings.enable_prefill_logprobs or not dialect.needs_prefill_setting
    spec = GenerationSpec(
        Request(
            request_id=0,
            prompt=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling_params(given, dialect.defaults(model), model.tokenizer),
            seed=seed_of(parameters.seed),
            samples=parameters.best_of or 1,
            end_ids=model.end_ids,
            adapter=model.adapter_of(parameters.adapter_id, "adapter_id"),
            prompt_logprobs=0 if parameters.decoder_input_details and scores_prompt else None,
        ),
        draws_seed=parameters.seed is None,
        stop=tuple(parameters.stop or ()),
        include_stop=dialect.includes_stop,
        stop_search=dialect.stop_search,
        length_first=dialect.length_first,
    )
    grammar = grammar_of("grammar", parameters.grammar, needs_properties=dialect.needs_properties)
    return with_grammar(settings, spec, None if grammar is None else NamedGrammar("grammar", grammar))


def _is_sampled(parameters: Parameters) -> bool:
    """True if they ask for sampling, or choose how to sample."""
    if parameters.do_sample:
        return True
    return parameters.temperature != 0 and any(getattr(parameters, name) is not None for name in _SAMPLING)
