"""Handle OpenAI's `/v1/files`: upload the input of a batch, and read what batches have written."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from funitel.proto.errors import InvalidRequest, NotFound, PayloadTooLarge
from funitel.proto.printable import shortened
from funitel.router.api.batches.common import batches_of, owner_of, page_of
from funitel.router.api.batches.schema import FileDeleted, FileList, FileObject, ListFilesQuery
from funitel.router.api.common.body import declared_size, json_answer, query_of
from funitel.router.api.common.handler import service_of
from funitel.router.batch.folder import PartialFile
from funitel.router.batch.formats import new_id
from funitel.router.batch.records import StoredFile
from funitel.router.batch.store import BatchStore
from funitel.router.transport.memory_budget import TOO_LARGE
from funitel.router.transport.multipart import FormReader, boundary_of

PURPOSE = "batch"
FORM_BYTES = 16_384  # of a form beside its file
MAX_NAME = 255
WRITE_BYTES = 1 << 20


async def upload(http: HttpRequest) -> Response:
    """`POST /v1/files`: keep a file."""
    opened = await batches_of(http).opened()
    limit = service_of(http).settings.max_batch_file_bytes
    boundary = boundary_of(http.headers.get("content-type", ""))
    if declared_size(http) > limit + FORM_BYTES:
        raise _too_large(limit)
    async with opened.folder.writing() as part:
        content = _Content(part, limit)
        form = FormReader(boundary, "file", content.take)
        await form.read(_chunks(http, content))
        if form.filename is None:
            raise InvalidRequest("file: this field is required", "file", "missing_required_parameter")
        if form.fields.get("purpose") != PURPOSE:
            given = shortened(form.fields.get("purpose", "none"), 64)
            raise InvalidRequest(f"purpose: must be `{PURPOSE}`. Given: {given}", "purpose")
        await content.flush()
        if not part.num_bytes:
            raise InvalidRequest("file: must not be empty", "file")
        file = StoredFile(
            id=new_id("file-"),
            owner=owner_of(http),
            created_at=int(time.time()),
            num_bytes=part.num_bytes,
            filename=form.filename[:MAX_NAME],
            purpose=PURPOSE,
        )
        await asyncio.to_thread(part.keep, file.id)
    await opened.store(BatchStore.add_file, file)
    return json_answer(FileObject.of(file))


class _Content:
    """The content of a file that arrives, written off the event loop a megabyte at a time."""

    def __init__(self, part: PartialFile, limit: int) -> None:
        self._part = part
        self._limit = limit
        self._held: list[bytes] = []
        self._num_held = 0

    def take(self, content: bytes) -> None:
        """Add some; raises PayloadTooLarge."""
        self._held.append(content)
        self._num_held += len(content)
        if self._part.num_bytes + self._num_held > self._limit:
            raise _too_large(self._limit)

    @property
    def is_full(self) -> bool:
        """Whether it is time to write."""
        return self._num_held >= WRITE_BYTES

    async def flush(self) -> None:
        """Write what is held; raises StorageFailed."""
        content, self._held, self._num_held = b"".join(self._held), [], 0
        if content:
            await asyncio.to_thread(self._part.write, content)


async def _chunks(http: HttpRequest, content: _Content) -> AsyncIterator[bytes]:
    async for chunk in http.stream():
        if TOO_LARGE in http.scope:
            raise PayloadTooLarge("a chunked body is longer than --payload-limit: send it with a content-length")
        yield chunk
        if content.is_full:
            await content.flush()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"file: must have at most {limit} bytes (--max-batch-file-bytes)")


async def list_files(http: HttpRequest) -> Response:
    """`GET /v1/files`: the files of the key, a page at a time."""
    store, query = (await batches_of(http).opened()).store, query_of(http, ListFilesQuery)
    page = page_of(query.limit, query.after, is_newest_first=query.order == "desc")
    files, has_more = await store(BatchStore.files, owner_of(http), page, query.purpose)
    listed = FileList(
        data=[FileObject.of(file) for file in files],
        first_id=files[0].id if files else None,
        last_id=files[-1].id if files else None,
        has_more=has_more,
    )
    return json_answer(listed)


async def retrieve(http: HttpRequest) -> Response:
    """`GET /v1/files/{file_id}`: what is known of a file."""
    return json_answer(FileObject.of(await _file(http)))


async def content(http: HttpRequest) -> Response:
    """`GET /v1/files/{file_id}/content`: the bytes of a file."""
    file = await _file(http)
    path = (await batches_of(http).opened()).folder.path_of(file.id)
    if not await asyncio.to_thread(path.is_file):
        raise NotFound(f"the content of file {file.id!r} is gone")
    return FileResponse(path, media_type="application/octet-stream")


async def delete(http: HttpRequest) -> Response:
    """`DELETE /v1/files/{file_id}`: keep a file no more."""
    opened, file = await batches_of(http).opened(), await _file(http)
    user = await opened.store(BatchStore.remove_file, file.id, file.owner)
    if user is not None:
        raise InvalidRequest(f"the file is the input of batch {user!r}, which has not ended", "file_id")
    await asyncio.to_thread(opened.folder.remove, file.id)
    return json_answer(FileDeleted(id=file.id))


async def _file(http: HttpRequest) -> StoredFile:
    id: str = http.path_params["file_id"]
    file = await (await batches_of(http).opened()).store(BatchStore.file, id, owner_of(http))
    if file is None:
        raise NotFound(f"there is no file with id {shortened(id, 128)!r}")
    return file
