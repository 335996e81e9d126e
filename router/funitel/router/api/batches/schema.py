"""Records of OpenAI's files and batches API: queries, bodies and answers."""

from typing import Annotated, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, Body, Metadata
from funitel.router.batch.formats import Endpoint
from funitel.router.batch.records import BatchStatus, StoredBatch, StoredFile

MAX_LISTED = 100
MAX_FILES_LISTED = 10_000

Id = Annotated[str, Field(min_length=1, max_length=128)]


class ListFilesQuery(ApiModel):
    """Which files are listed."""

    purpose: str | None = Field(default=None, max_length=64)
    limit: int = Field(default=MAX_FILES_LISTED, ge=1, le=MAX_FILES_LISTED)
    order: Literal["asc", "desc"] = "desc"
    after: Id | None = Field(default=None, description="Id of the file after which the page begins.")


class FileObject(ApiModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> "FileObject":
        """Describe a file of the store."""
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=file.created_at,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(ApiModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ApiModel):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class CreateBatchRequest(Body):
    """A batch: the requests of a file, all to one endpoint."""

    input_file_id: Id
    endpoint: Endpoint
    completion_window: str = Field(
        max_length=16,
        pattern=r"^[1-9][0-9]{0,5}[smhd]$",
        description="Time after which what was not run is an error, such as `24h`; at most a week.",
    )
    metadata: Metadata | None = None


class ListBatchesQuery(ApiModel):
    """Which batches are listed, the newest first."""

    limit: int = Field(default=20, ge=1, le=MAX_LISTED)
    after: Id | None = Field(default=None, description="Id of the batch after which the page begins.")


class BatchErrorObject(ApiModel):
    """Why a batch failed; `line` is that of the input file, counted from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrorList(ApiModel):
    """Everything that is wrong with a batch."""

    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(ApiModel):
    """Requests of a batch: all, and those that ended."""

    total: int
    completed: int
    failed: int


class BatchObject(ApiModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: StoredBatch) -> "BatchObject":
        """Describe a batch of the store."""
        errors = [
            BatchErrorObject(code=each.code, message=each.message, line=each.line, param=each.param)
            for each in batch.errors
        ]
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            errors=BatchErrorList(data=errors) if errors else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=batch.created_at,
            expires_at=batch.expires_at,
            request_counts=RequestCounts(
                total=batch.num_requests, completed=batch.num_completed, failed=batch.num_failed
            ),
            metadata=None if batch.metadata is None else dict(batch.metadata),
            in_progress_at=batch.times.get(BatchStatus.IN_PROGRESS),
            finalizing_at=batch.times.get(BatchStatus.FINALIZING),
            completed_at=batch.times.get(BatchStatus.COMPLETED),
            failed_at=batch.times.get(BatchStatus.FAILED),
            expired_at=batch.times.get(BatchStatus.EXPIRED),
            cancelling_at=batch.times.get(BatchStatus.CANCELLING),
            cancelled_at=batch.times.get(BatchStatus.CANCELLED),
        )


class BatchList(ApiModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UploadForm(ApiModel):
    """The form that uploads a file, as `multipart/form-data`."""

    purpose: Literal["batch"]
    file: str = Field(description="The content: a JSON object on each line.", json_schema_extra={"format": "binary"})
