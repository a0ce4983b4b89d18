"""Everything that can go wrong, as types.

QuireError
├── InvalidRequest           the request itself is wrong; sending it again cannot help
│   ├── PromptTooLong        it can never fit
│   └── TemplateFailed       the chat template cannot render it, or there is none
├── Overloaded               the queue is full; try again after `retry_after_s`
├── DeadlineExceeded         the time it was given has passed
├── RequestFailed            the device work of this one request fails
├── EngineFailed             the engine cannot run any request
├── EngineStopped            the engine is shutting down
├── InvalidSetting           a setting is wrong, or what it asks for does not fit
└── ModelError               a model cannot be served
    ├── UnsupportedModel     its architecture, or an option of it, is not implemented
    ├── InvalidCheckpoint    its files are incomplete, damaged or contradictory
    └── ModelUnavailable     its files cannot be fetched

Each has a `kind`, which is what clients see, and the HTTP `status` that goes with it. A message names the value and
the limit.
"""


class QuireError(Exception):
    kind = "internal"
    status = 500

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s  # None where trying again does not help


class InvalidRequest(QuireError):
    kind = "validation"
    status = 422


class PromptTooLong(InvalidRequest):
    kind = "prompt_too_long"


class TemplateFailed(InvalidRequest):
    kind = "template_error"


class Overloaded(QuireError):
    kind = "overloaded"
    status = 429


class DeadlineExceeded(QuireError):
    kind = "deadline_exceeded"
    status = 504


class RequestFailed(QuireError):
    kind = "generation"
    status = 424


class EngineFailed(QuireError):
    kind = "engine_failed"
    status = 503


class EngineStopped(QuireError):
    kind = "engine_stopped"
    status = 503


class InvalidSetting(QuireError):
    kind = "setting"


class ModelError(QuireError):
    kind = "model"


class UnsupportedModel(ModelError):
    kind = "unsupported_model"


class InvalidCheckpoint(ModelError):
    kind = "invalid_checkpoint"


class ModelUnavailable(ModelError):
    kind = "model_unavailable"
