"""OpenAI's files and batches API."""

from functools import partial

from funitel.router.api.batches import handlers_batches, handlers_files
from funitel.router.api.batches.schema import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    ListBatchesQuery,
    ListFilesQuery,
    UploadForm,
)
from funitel.router.api.common.error_schemas import OpenAIErrorResponse
from funitel.router.middleware.operation import Operation

FAILURES = (400, 404, 503, 507)
WRITE_FAILURES = (400, 404, 413, 415, 503, 507)

_kept = partial(Operation, error=OpenAIErrorResponse, failures=FAILURES)

ROUTES = (
    Operation(
        "/v1/files",
        handlers_files.upload,
        "Upload the input file of a batch",
        method="POST",
        form=UploadForm,
        answer=FileObject,
        error=OpenAIErrorResponse,
        failures=WRITE_FAILURES,
    ),
    _kept("/v1/files", handlers_files.list_files, "The files", method="GET", query=ListFilesQuery, answer=FileList),
    _kept("/v1/files/{file_id}", handlers_files.retrieve, "What is known of a file", method="GET", answer=FileObject),
    _kept("/v1/files/{file_id}", handlers_files.delete, "Keep a file no more", method="DELETE", answer=FileDeleted),
    _kept(
        "/v1/files/{file_id}/content",
        handlers_files.content,
        "The content of a file",
        method="GET",
        text="application/octet-stream",
    ),
    Operation(
        "/v1/batches",
        handlers_batches.create,
        "Run the requests of a file in what other requests leave free",
        CreateBatchRequest,
        BatchObject,
        method="POST",
        error=OpenAIErrorResponse,
        failures=WRITE_FAILURES,
    ),
    _kept(
        "/v1/batches",
        handlers_batches.list_batches,
        "The batches, the newest first",
        method="GET",
        query=ListBatchesQuery,
        answer=BatchList,
    ),
    _kept(
        "/v1/batches/{batch_id}",
        handlers_batches.retrieve,
        "A batch and how far it is",
        method="GET",
        answer=BatchObject,
    ),
    _kept(
        "/v1/batches/{batch_id}/cancel",
        handlers_batches.cancel,
        "Cancel a batch; its results so far are kept",
        method="POST",
        answer=BatchObject,
    ),
)
