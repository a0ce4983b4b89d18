"""The bodies of the answers of text-generation-inference's routes. The OpenAPI document is made of these types."""

from typing import Literal, NotRequired, TypedDict

from quire.server.service.ledger import Timings

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Token(TypedDict):
    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(TypedDict):
    id: int
    text: str
    logprob: float | None  # the first has none


class SequenceDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: NotRequired[list[list[Token]]]  # with top_n_tokens


class BestOfSequence(SequenceDetails):
    generated_text: str


class Details(SequenceDetails):
    best_of_sequences: NotRequired[list[BestOfSequence]]  # with best_of


class Generated(TypedDict):
    generated_text: str
    details: NotRequired[Details]  # with details or decoder_input_details
    timings: NotRequired[Timings]  # with timings


class StreamDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class GeneratedToken(TypedDict):
    """An event of a stream. The last has the text and the details."""

    index: int
    token: Token
    top_tokens: NotRequired[list[Token]]  # with top_n_tokens
    generated_text: str | None
    details: StreamDetails | None
    timings: NotRequired[Timings]  # with timings


class TokenSpan(TypedDict):
    id: int
    text: str
    start: int  # in bytes
    stop: int


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]  # with return_token_strs


class ChatTokenized(TypedDict):
    tokenize_response: list[TokenSpan]
    templated_text: str


class Detokenized(TypedDict):
    prompt: str


class AddedToken(TypedDict):
    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfo(TypedDict):
    """The fields of tokenizer_config.json. Tokens that the model does not have are null."""

    tokenizer_class: str
    clean_up_tokenization_spaces: bool
    added_tokens_decoder: dict[str, AddedToken]
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class Info(TypedDict):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class Predictions(TypedDict):
    predictions: list[str]
    timings: NotRequired[Timings]  # with the x-quire-timings header


ErrorType = Literal["validation", "template_error", "overloaded", "generation", "incomplete_generation"]


class TGIError(TypedDict):
    error: str
    error_type: ErrorType


# KServe's protocol


class KServeServer(TypedDict):
    name: str
    version: str
    extensions: list[str]


class KServeLive(TypedDict):
    live: bool


class InferredOutput(TypedDict):
    name: str
    shape: list[int]
    datatype: Literal["BYTES"]
    data: list[int]  # bytes of UTF-8


class Inferred(TypedDict):
    id: str
    outputs: list[InferredOutput]
    timings: NotRequired[Timings]
