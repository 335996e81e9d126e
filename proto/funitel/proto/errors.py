"""Define the error hierarchy of funitel, with the codes of each protocol as class attributes.

Handlers and the servicer read these attributes; they contain no `isinstance` ladders.

    FunitelError
    ├── InvalidRequest            the request is invalid; the message names field, value and limit
    │   ├── ContextTooLong        prompt or prompt + completion over the model's limits
    │   ├── MalformedBody         not JSON at all
    │   ├── PayloadTooLarge       body over --payload-limit
    │   ├── UnsupportedMediaType  a body that is not application/json
    │   │   └── UnsupportedEncoding  a body that is compressed
    │   ├── TemplateError         the chat template is missing or refused the messages
    │   ├── NoInstances           Vertex AI: nothing to predict
    │   ├── NotUtf8               KServe: bytes that are not UTF-8
    │   ├── LengthMismatch        KServe: the numbers of outputs and inputs differ
    │   ├── ToolError             the tool choice does not match the tools
    │   ├── SuffixNotSupported    a completion with a suffix
    │   ├── BatchSizeExceeded     more prompts than `--max-client-batch-size`, or texts than `--max-client-texts`
    │   └── WrongTask             the served model does not support the task of the route
    ├── Unauthorized              missing or wrong API key
    ├── Forbidden                 the API key is not for this route or model
    ├── RateLimited               the API key has reached its limit per minute, or of concurrent requests
    ├── QuotaExceeded             a key or a user has used up what it may within a month
    ├── NotFound                  the resource of a path does not exist
    │   └── ModelNotFound         the named model is not served
    ├── Gone                      the resource of a path was there, and cannot be had any more
    ├── Conflict                  what is asked contradicts the state of a model: a name is taken, the model is in use
    ├── LaunchFailed              a model that a client waits for has failed to load
    ├── LaunchCancelled           a model that a client waits for was cancelled
    ├── DoesNotFit                a model does not fit the memory beside those that may not be evicted
    ├── Overloaded                too many requests in flight, or the deadline cannot be met
    ├── DeadlineExceeded          the client's deadline has passed
    ├── NotReady                  starting or draining
    │   ├── ShuttingDown          draining: the request or its answer came too late
    │   └── ModelNotLoaded        the model is not in memory: it is being loaded, or loading it failed
    ├── Cancelled                 the client disconnected
    ├── Incomplete                a generation ended without its final message
    ├── ShardFailed               a shard died, diverged or timed out
    │   └── ShardUnsound          a shard answers but must not be used: wrong answers, a hang, or lost ranks
    ├── WrongState                a shard cannot do this now: it sleeps, or has sequences
    ├── StorageFailed             a folder cannot be written, such as that of a full disk
    ├── StepFailed                one step failed, the shard is usable
    │   ├── UnknownBatch          a call names a batch or request the shard does not hold
    │   ├── ResourceExhausted     there was no memory for the step
    │   ├── SlotsLost             cached blocks could not be copied from or to their slots; nothing was computed
    │   └── BrokenScores          the logits of a sequence are not finite
    └── StartupError              a process cannot start
        ├── SettingsError         flags or variables are invalid or contradict each other
        ├── OtherKeeper           the keeper is of another version
        ├── MissingPackage        a package of an extra is not installed
        ├── WeightsError          checkpoint missing, truncated, mismatched
        ├── UnsupportedModel      the architecture is not supported
        │   ├── NoRow             the registry has no row for it; transformers may run it
        │   └── Unsuited          not in one way of running it; another way may do
        └── NotEnoughMemory       weights or pool do not fit
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from funitel.proto.printable import printable, shortened

MAX_CHARACTERS = 2000
"""Maximum length of a message; longer ones quote foreign text, and are cut."""
MAX_PARAM_CHARACTERS = 200
"""Maximum length of a field name; clients can invent names."""


class FunitelError(Exception):
    """Base of all funitel errors. `message` is one line fit for a user, of a bounded length."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    openai_code: ClassVar[str] = ""  # OpenAI's code, if it has one
    anthropic_type: ClassVar[str] = ""  # Anthropic's type, if the status alone does not determine it
    prefix: ClassVar[str] = ""
    grpc_status: ClassVar[str] = "INTERNAL"  # name of a grpc.StatusCode; gRPC itself takes a launcher 70 ms to import
    metric: ClassVar[str] = "generation"
    exit_code: ClassVar[int] = 1  # of a process that it ends
    retry_after: ClassVar[bool] = False
    position: int | None = None  # of a refused request in the queue
    wait_seconds: float | None = None  # estimated time to its start

    def __init__(self, message: str) -> None:
        self.message = shortened(" ".join(message.split()), MAX_CHARACTERS)
        super().__init__(self.message)

    @property
    def is_ours(self) -> bool:
        """Whether it is a server error by TGI's statuses, in which 424 is a failed generation."""
        return self.http_status >= 500 or self.http_status == 424

    @property
    def public_message(self) -> str:
        """The text clients see: TGI's prefix for the class, then the message."""
        return self.prefix + self.message


@contextmanager
def translating(make: Callable[[Exception], FunitelError]) -> Iterator[None]:
    """Translate exceptions of a library to `make(error)`, with the cause; a FunitelError passes unchanged."""
    try:
        yield
    except FunitelError:
        raise
    except Exception as error:
        raise make(error) from error


class InvalidRequest(FunitelError):
    """The request is invalid; nothing was computed. `param` names the field at fault, if any."""

    http_status = 422
    error_type = "validation"
    prefix = "Input validation error: "
    grpc_status = "INVALID_ARGUMENT"
    metric = "validation"

    def __init__(self, message: str, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        self.code = code  # OpenAI's, of this one error
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


class UnsupportedEncoding(UnsupportedMediaType):
    """The body is compressed."""


class TemplateError(InvalidRequest):
    """The chat template is missing or refused the messages."""

    error_type = "template_error"
    prefix = "Template error: "
    metric = "template"


class NoInstances(InvalidRequest):
    """A Vertex AI request without instances; tagged as TGI tags it."""

    error_type = "Input validation error"


class NotUtf8(InvalidRequest):
    """A KServe input that is not UTF-8."""

    error_type = "utf8"


class LengthMismatch(InvalidRequest):
    """A KServe request with different numbers of outputs and inputs."""

    error_type = "length mismatch"


class ToolError(InvalidRequest):
    """The tool choice does not match the tools."""

    error_type = "tool_error"
    prefix = "Tool error: "


class SuffixNotSupported(InvalidRequest):
    """A completion with a suffix."""

    error_type = "suffix not supported"


class BatchSizeExceeded(InvalidRequest):
    """More prompts than `--max-client-batch-size`, or more texts than `--max-client-texts`."""

    error_type = "batch size exceeded"


class WrongTask(InvalidRequest):
    """The served model does not support the task of the route."""

    error_type = "wrong_task"
    openai_code = "model_not_supported"


class Unauthorized(FunitelError):
    """Missing or wrong bearer token."""

    http_status = 401
    openai_code = "invalid_api_key"
    error_type = "unauthorized"
    grpc_status = "UNAUTHENTICATED"
    metric = "validation"


class Forbidden(FunitelError):
    """The API key is valid, but not for this route or model."""

    http_status = 403
    openai_code = "insufficient_permissions"
    error_type = "forbidden"
    grpc_status = "PERMISSION_DENIED"
    metric = "validation"


class RateLimited(FunitelError):
    """The API key has reached a limit; `wait_seconds` is the time until it may be used again, if known."""

    http_status = 429
    openai_code = "rate_limit_exceeded"
    anthropic_type = "rate_limit_error"
    error_type = "rate_limited"
    grpc_status = "RESOURCE_EXHAUSTED"
    metric = "rate_limited"
    retry_after = True

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class QuotaExceeded(FunitelError):
    """A key or a user has used up what it may within a month; `limit` names the limit."""

    http_status = 429
    openai_code = "insufficient_quota"
    anthropic_type = "rate_limit_error"
    error_type = "quota_exceeded"
    grpc_status = "RESOURCE_EXHAUSTED"
    metric = "rate_limited"

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


class NotFound(FunitelError):
    """The resource of a path does not exist."""

    http_status = 404
    error_type = "not_found"
    grpc_status = "NOT_FOUND"
    metric = "validation"


class Gone(FunitelError):
    """The resource of a path was there, and cannot be had any more; the message says why."""

    http_status = 410
    error_type = "gone"
    grpc_status = "NOT_FOUND"
    metric = "validation"


class ModelNotFound(NotFound):
    """No model of that name is served."""

    openai_code = "model_not_found"
    param = "model"


class Conflict(FunitelError):
    """What is asked contradicts the state of a model, such as a name that is taken."""

    http_status = 409
    error_type = "conflict"
    grpc_status = "FAILED_PRECONDITION"
    metric = "validation"


class LaunchFailed(FunitelError):
    """The launch of a model has failed; the message has the reason."""

    http_status = 503
    retry_after = True
    error_type = "launch_failed"
    grpc_status = "UNAVAILABLE"


class LaunchCancelled(FunitelError):
    """The launch of a model was cancelled."""

    http_status = 499
    error_type = "launch_cancelled"
    grpc_status = "CANCELLED"


class DoesNotFit(FunitelError):
    """A model does not fit the memory; the message says what would fit."""

    http_status = 507
    error_type = "does_not_fit"
    grpc_status = "RESOURCE_EXHAUSTED"


class Overloaded(FunitelError):
    """Admission refused: by a bound of the queue, by fairness, or by the client's deadline.

    The queue position and the estimated wait, if known, are for the client; `reason` names the bound, for metrics.
    """

    http_status = 429
    error_type = "overloaded"
    prefix = "Model is overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"
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
    """The client's deadline passed before the answer was complete."""

    http_status = 504
    error_type = "timeout"
    prefix = "Request timed out: "
    grpc_status = "DEADLINE_EXCEEDED"
    metric = "timeout"


class NotReady(FunitelError):
    """The service is starting or draining."""

    http_status = 503
    error_type = "healthcheck"
    prefix = "unhealthy: "
    grpc_status = "UNAVAILABLE"
    retry_after = True


class ShuttingDown(NotReady):
    """The server is shutting down: a request came too late, or its answer was not complete in time."""

    error_type = "shutting_down"
    prefix = "Server is shutting down: "
    metric = "shutting_down"


class ModelNotLoaded(NotReady):
    """The model that a request names is not in memory; `wait_seconds` is the time that loading it takes, if known."""

    error_type = "model_not_loaded"
    openai_code = "model_not_loaded"
    prefix = ""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class Cancelled(FunitelError):
    """The client disconnected; no answer is sent."""

    http_status = 499
    error_type = "cancelled"
    grpc_status = "CANCELLED"
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
    grpc_status = "INTERNAL"


class ShardUnsound(ShardFailed):
    """A shard answers but must not be used again: it gave an impossible answer, hangs, or has lost other ranks."""

    grpc_status = "DATA_LOSS"


class WrongState(FunitelError):
    """A call that the state of a shard does not allow: a step while it sleeps, or Sleep while it has sequences."""

    http_status = 409
    error_type = "conflict"
    grpc_status = "FAILED_PRECONDITION"


class StorageFailed(FunitelError):
    """A folder cannot be read or written; the disk may be full."""

    http_status = 507
    error_type = "storage"


class StepFailed(FunitelError):
    """One step failed; the shard is usable and its other batches are intact."""

    http_status = 424
    error_type = "generation"
    prefix = "Request failed during generation: "
    grpc_status = "ABORTED"


class UnknownBatch(StepFailed):
    """A call names a batch, or a request of it, that the shard does not hold. INTERNAL, as TGI's shards answer."""

    grpc_status = "INTERNAL"


class ResourceExhausted(StepFailed):
    """Out of memory in a step; its memory was freed, and a smaller step may fit."""

    grpc_status = "RESOURCE_EXHAUSTED"


class SlotsLost(StepFailed):
    """Copies between blocks and their slots failed, so the step was not computed; `slots` hold nothing any more."""

    def __init__(self, message: str, slots: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.slots = slots


class BrokenScores(StepFailed):
    """The logits of a sequence are NaN or infinite; the other sequences of its step are unaffected."""


class StartupError(FunitelError):
    """A process cannot start; the message says what to change. Exit code 1.

    Messages quote names from foreign files: characters that cannot be printed are escaped.
    """

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = printable(self.message)


class SettingsError(StartupError):
    """Settings are invalid, or contradict each other or the machine."""


class OtherKeeper(StartupError):
    """The keeper is of another version than the router. The launcher replaces it, and starts the router again."""

    exit_code = 76


class MissingPackage(StartupError, ImportError):
    """A package that comes with an extra of funitel is not installed; the message names the extra."""


class WeightsError(StartupError):
    """A checkpoint is missing, truncated, mismatched or incomplete."""


class UnsupportedModel(StartupError):
    """No specification or code path supports this architecture."""


class NoRow(UnsupportedModel):
    """The registry has no row for the model, for the reason `why`; transformers may run it."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or self.message


class Unsuited(UnsupportedModel):
    """The model cannot be computed in one way, for the reason given; another may do."""


class NotEnoughMemory(StartupError):
    """Weights or the KV pool do not fit."""
