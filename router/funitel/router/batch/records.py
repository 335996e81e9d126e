"""Records of files, batches and their requests, as the store keeps them. Instants are seconds of the wall clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class BatchStatus(StrEnum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether the batch changes no more."""
        return self in _ENDED


_ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of an owner; its content is in the folder, under its id."""

    id: str
    owner: str
    created_at: int
    num_bytes: int
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed: of a line of its input file, which is counted from 1, or of the whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch of an owner. `times` has the instant at which each status but the first was entered."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    times: Mapping[BatchStatus, int] = field(default_factory=dict)
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch: its line in the input file, counted from 1, and the bytes that line has there."""

    line: int
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The end of a request: the line that the output or the error file gets, without its line break."""

    line: int
    custom_id: str
    is_success: bool
    content: bytes | None  # None: it was not run


@dataclass(frozen=True, slots=True)
class Page:
    """Which of the files or batches of an owner are listed: so many behind one of them, the newest first or last."""

    limit: int
    after: str | None = None
    is_newest_first: bool = True
