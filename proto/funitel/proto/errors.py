"""Every failure funitel can name, once, with the codes each protocol gives it.

Handlers and the servicer map by attribute, never by `isinstance` ladders.

    FunitelError
    ├── InvalidRequest            the caller's request is wrong; the message names field, value and limit
    │   ├── ContextTooLong        prompt or prompt + completion over the model's limits
    │   ├── MalformedBody         not JSON at all
    │   ├── PayloadTooLarge       body over --payload-limit
    │   ├── UnsupportedMediaType  a body that is not application/json
    │   ├── TemplateError         the chat template refused the messages
    │   ├── NoInstances           Vertex AI: nothing to predict
    │   ├── NotUtf8               KServe: bytes that are no text
    │   ├── LengthMismatch        KServe: another number of outputs than inputs
    │   ├── ToolError             tools and what is asked of them do not fit together
    │   ├── SuffixNotSupported    a completion that shall end in a given text
    │   ├── BatchSizeExceeded     more prompts than `--max-client-batch-size`, or texts than `--max-client-texts`
    │   └── WrongTask             the model served does not do what the route is for
    ├── Unauthorized              missing or wrong API key
    ├── Forbidden                 the API key is not for this route or model
    ├── RateLimited               the API key has used up what it may use in a minute, or at once
    ├── NotFound                  what a path names is not there
    │   └── ModelNotFound         the model it names is not the one served
    ├── Overloaded                too many requests at once, or no time left for this one
    ├── DeadlineExceeded          the time the client gave has passed
    ├── NotReady                  starting or draining
    │   └── ShuttingDown          draining: too late for a request, or for its answer
    ├── Cancelled                 the client left
    ├── Incomplete                a generation ended without its final message
    ├── ShardFailed               a shard died, diverged or timed out
    │   └── ShardUnsound          a shard that answers is not to be used again: it lies, hangs, or has lost the others
    ├── StepFailed                one step failed, the shard is sound
    │   ├── UnknownBatch          a call names a batch or request the shard does not hold
    │   ├── ResourceExhausted     there was no memory for the step
    │   └── BrokenScores          the model gave a sequence scores that are not numbers
    └── StartupError              a process cannot start
        ├── SettingsError         flags or variables contradict each other
        ├── WeightsError          checkpoint missing, truncated, mismatched
        ├── UnsupportedModel      no way to run this architecture
        │   └── NoRow             it is in no row of the table; transformers may run it
        └── NotEnoughMemory       weights or pool do not fit
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import grpc

from funitel.proto.printable import printable, shortened

MAX_CHARACTERS = 2000
"""Longest message: what is longer quotes what others sent or wrote, and is cut."""
MAX_PARAM_CHARACTERS = 200
"""Longest name of a field; clients make up names too."""


class FunitelError(Exception):
    """Base of all funitel errors. `message` is one line fit for a user, of a bounded length."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    openai_code: ClassVar[str] = ""  # OpenAI's word for it, where it has one
    anthropic_type: ClassVar[str] = ""  # Anthropic's, where the status alone does not say it
    prefix: ClassVar[str] = ""
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    metric: ClassVar[str] = "generation"
    retry_after: ClassVar[bool] = False
    position: int | None = None  # in the queue, where a refused request would have stood
    wait_seconds: float | None = None  # estimated until it would have begun

    def __init__(self, message: str) -> None:
        self.message = shortened(" ".join(message.split()), MAX_CHARACTERS)
        super().__init__(self.message)

    @property
    def is_ours(self) -> bool:
        """Whether it is the server's fault, by TGI's statuses: 424 is a generation that failed."""
        return self.http_status >= 500 or self.http_status == 424

    @property
    def public_message(self) -> str:
        """The text clients see: TGI's prefix for the class, then the message."""
        return self.prefix + self.message


@contextmanager
def translating(make: Callable[[Exception], FunitelError]) -> Iterator[None]:
    """Raise what a library raises inside as `make(error)`, with its cause. A FunitelError passes unchanged."""
    try:
        yield
    except FunitelError:
        raise
    except Exception as error:
        raise make(error) from error


class InvalidRequest(FunitelError):
    """The request breaks a rule; nothing was computed. `param` names the field at fault, where there is one."""

    http_status = 422
    error_type = "validation"
    prefix = "Input validation error: "
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    metric = "validation"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARACTERS)


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt plus completion, exceeds the limits in tokens."""

    openai_code = "context_length_exceeded"


class MalformedBody(InvalidRequest):
    """The body is not JSON."""

    http_status = 400


class PayloadTooLarge(InvalidRequest):
    """The body exceeds `--payload-limit`."""

    http_status = 413


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as JSON."""

    http_status = 415


class TemplateError(InvalidRequest):
    """The chat template is missing or refused the messages."""

    error_type = "template_error"
    prefix = "Template error: "
    metric = "template"


class NoInstances(InvalidRequest):
    """A Vertex AI request without instances; tagged as TGI tags it."""

    error_type = "Input validation error"


class NotUtf8(InvalidRequest):
    """A KServe input whose bytes are not UTF-8."""

    error_type = "utf8"


class LengthMismatch(InvalidRequest):
    """A KServe request that wants another number of outputs than it has inputs."""

    error_type = "length mismatch"


class ToolError(InvalidRequest):
    """Tools, and what is asked of them, do not fit together."""

    error_type = "tool_error"
    prefix = "Tool error: "


class SuffixNotSupported(InvalidRequest):
    """A completion shall end in a given text."""

    error_type = "suffix not supported"


class BatchSizeExceeded(InvalidRequest):
    """A completion has more prompts than `--max-client-batch-size`, or another request more texts than may be."""

    error_type = "batch size exceeded"


class WrongTask(InvalidRequest):
    """The model served does not do what the route is for."""

    error_type = "wrong_task"
    openai_code = "model_not_supported"


class Unauthorized(FunitelError):
    """Missing or wrong bearer token."""

    http_status = 401
    openai_code = "invalid_api_key"
    error_type = "unauthorized"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    metric = "validation"


class Forbidden(FunitelError):
    """The API key is a right one, and not for this."""

    http_status = 403
    openai_code = "insufficient_permissions"
    error_type = "forbidden"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    metric = "validation"


class RateLimited(FunitelError):
    """The API key has used up what it may use in a minute, or at once; seconds until it may again, where known."""

    http_status = 429
    openai_code = "rate_limit_exceeded"
    anthropic_type = "rate_limit_error"
    error_type = "rate_limited"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    metric = "rate_limited"
    retry_after = True

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class NotFound(FunitelError):
    """What a path names is not there."""

    http_status = 404
    error_type = "not_found"
    grpc_status = grpc.StatusCode.NOT_FOUND
    metric = "validation"


class ModelNotFound(NotFound):
    """No model of that name is served."""

    openai_code = "model_not_found"
    param = "model"


class Overloaded(FunitelError):
    """No place in the queue, by its bounds, by fairness, or within the time that the client gave.

    Its place there and the estimated seconds until it would have begun, where they are known, are for the client;
    `reason` is the bound, for metrics.
    """

    http_status = 429
    error_type = "overloaded"
    prefix = "Model is overloaded"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    metric = "overloaded"
    retry_after = True

    def __init__(
        self, message: str, position: int | None = None, wait_seconds: float | None = None, reason: str = "requests"
    ) -> None:
        super().__init__(message)
        self.position = position
        self.wait_seconds = wait_seconds
        self.reason = reason


class DeadlineExceeded(FunitelError):
    """The time that the client gave for a request has passed before its answer was whole."""

    http_status = 504
    error_type = "timeout"
    prefix = "Request timed out: "
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    metric = "timeout"


class NotReady(FunitelError):
    """The service is starting or draining."""

    http_status = 503
    error_type = "healthcheck"
    prefix = "unhealthy: "
    grpc_status = grpc.StatusCode.UNAVAILABLE
    retry_after = True


class ShuttingDown(NotReady):
    """The server ends: a request came too late, or its answer was not whole in time."""

    error_type = "shutting_down"
    prefix = "Server is shutting down: "
    metric = "shutting_down"


class Cancelled(FunitelError):
    """The client left; no answer is sent."""

    http_status = 499
    error_type = "cancelled"
    grpc_status = grpc.StatusCode.CANCELLED
    metric = "dropped"


class Incomplete(FunitelError):
    """A generation ended without its final message."""

    http_status = 500
    error_type = "incomplete_generation"
    prefix = "Incomplete generation: "
    metric = "incomplete"


class ShardFailed(FunitelError):
    """A shard died, gave an impossible answer or did not answer in time."""

    http_status = 424
    error_type = "generation"
    prefix = "Request failed during generation: "
    grpc_status = grpc.StatusCode.INTERNAL


class ShardUnsound(ShardFailed):
    """A shard answers, and is not to be used again: it gave an impossible answer, hangs, or has lost other ranks."""

    grpc_status = grpc.StatusCode.DATA_LOSS


class StepFailed(FunitelError):
    """One step failed; the shard is sound and its other batches are intact."""

    http_status = 424
    error_type = "generation"
    prefix = "Request failed during generation: "
    grpc_status = grpc.StatusCode.ABORTED


class UnknownBatch(StepFailed):
    """A call names a batch, or a request of it, that the shard does not hold. INTERNAL, as TGI's shards answer."""

    grpc_status = grpc.StatusCode.INTERNAL


class ResourceExhausted(StepFailed):
    """There was no memory for a step; what it took was given back, and a smaller one may fit."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class BrokenScores(StepFailed):
    """The model gave a sequence scores that are not numbers, or infinite; every other sequence of its step is well."""


class StartupError(FunitelError):
    """A process cannot start; the message says what to change. Exit code 1.

    Messages quote names out of files that others wrote: what cannot be printed is escaped.
    """

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = printable(self.message)


class SettingsError(StartupError):
    """Settings contradict each other or the machine."""


class WeightsError(StartupError):
    """A checkpoint is missing, truncated, mismatched or incomplete."""


class UnsupportedModel(StartupError):
    """No specification or code path runs this architecture."""


class NoRow(UnsupportedModel):
    """No row of the table describes the model, for the reason `why`; transformers may run it."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or self.message


class NotEnoughMemory(StartupError):
    """Weights or the KV pool do not fit."""
