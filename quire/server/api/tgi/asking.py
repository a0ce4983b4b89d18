"""From the parameters of /generate to what the engine is asked."""

from quire.errors import InvalidRequest, PromptTooLong
from quire.files.generation_defaults import GenerationDefaults
from quire.request import Request
from quire.server.api.sampling import between, sampling_params, seed_of
from quire.server.api.tgi.end_anchored_stops import EndAnchoredStops
from quire.server.api.tgi.quirks import check_strictly
from quire.server.api.tgi.requests import Parameters
from quire.server.service.job import GenerationSpec
from quire.server.service.served_model import ServedModel
from quire.server.settings import ServerSettings
from quire.text.stop_strings import StopStrings, check_stops

_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "min_p")


def is_sampled(parameters: Parameters | None) -> bool:
    """Without parameters it is; with them, when they say so or say how."""
    if parameters is None or parameters.do_sample:
        return True
    if parameters.temperature == 0:
        return False
    return any(getattr(parameters, name) is not None for name in _SAMPLING)


def check(parameters: Parameters, settings: ServerSettings, *, stream: bool) -> None:
    """The rules of every parameter that has one of its own."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    between("best_of", best_of, 1, settings.max_best_of)
    if best_of > 1:
        if not is_sampled(parameters):
            raise InvalidRequest.for_field("best_of", f"is {best_of}; without sampling all answers are the same")
        if stream:
            raise InvalidRequest.for_field("best_of", f"is {best_of}; answers that are chosen among cannot be streamed")
        if settings.tgi_strict and parameters.seed is not None:
            raise InvalidRequest.for_field(
                "best_of", f"is {best_of} and seed is {parameters.seed}; only one can be given"
            )
    if parameters.decoder_input_details and stream:
        raise InvalidRequest.for_field("decoder_input_details", "is true; it cannot be streamed")
    if parameters.max_new_tokens is not None and parameters.max_new_tokens < 1:
        raise InvalidRequest.for_field("max_new_tokens", f"is {parameters.max_new_tokens}; it must be at least 1")
    check_stops(parameters.stop or (), settings.max_stop_sequences)
    between("top_n_tokens", parameters.top_n_tokens or 0, 0, settings.max_top_n_tokens)
    if settings.tgi_strict:
        check_strictly(
            parameters.top_p, parameters.temperature, parameters.typical_p, parameters.top_k, parameters.seed
        )


def refuse_details(parameters: Parameters, settings: ServerSettings) -> None:
    """For routes that answer with texts alone. text-generation-inference leaves out what was asked for."""
    if settings.tgi_strict:
        return
    for name in ("details", "decoder_input_details", "top_n_tokens"):
        value = getattr(parameters, name)
        if value:
            raise InvalidRequest.for_field(f"parameters.{name}", f"is {value}; this route answers with texts alone")


def ask(
    model: ServedModel,
    settings: ServerSettings,
    parameters: Parameters,
    tokens: list[int],
    *,
    sampled: bool,
    scored: bool,
) -> GenerationSpec:
    """`scored`: the answer shows the log-probability of each token."""
    if parameters.truncate is not None:
        between("truncate", parameters.truncate, 1, model.max_input_tokens)
        tokens = tokens[-parameters.truncate :]
    model.check_prompt(tokens, "inputs")
    max_tokens = parameters.max_new_tokens
    if max_tokens is None:
        max_tokens = model.room_after(len(tokens), "inputs")
    if len(tokens) + max_tokens > model.max_total_tokens:
        raise PromptTooLong.for_field(
            "inputs",
            f"has {len(tokens)} tokens and max_new_tokens is {max_tokens}, together "
            f"{len(tokens) + max_tokens}; the limit is {model.max_total_tokens}",
        )
    given = {name: getattr(parameters, name) for name in (*_SAMPLING, "repetition_penalty")}
    given |= {"frequency_penalty": parameters.frequency_penalty, "presence_penalty": parameters.presence_penalty}
    given["logprobs"] = (parameters.top_n_tokens or 0) if scored else None
    if not sampled:
        given["temperature"] = 0.0
    strict = settings.tgi_strict
    shows_prefill = settings.enable_prefill_logprobs or not strict
    return GenerationSpec(
        Request(
            request_id=0,
            prompt=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling_params(given, GenerationDefaults() if strict else model.defaults, model.tokenizer),
            seed=seed_of(parameters.seed),
            samples=parameters.best_of or 1,
            end_ids=model.end_ids,
            prompt_logprobs=0 if parameters.decoder_input_details and shows_prefill else None,
        ),
        stop=tuple(parameters.stop or ()),
        include_stop=True,  # clients expect to find it, and cut it off themselves
        stop_search=EndAnchoredStops if strict else StopStrings,
        length_first=strict,
    )
