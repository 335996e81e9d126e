"""Handle OpenAI's `/v1/batches`: create, retrieve, list and cancel batches."""

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, NotFound
from funitel.proto.printable import shortened
from funitel.router.api.batches.common import batches_of, owner_of, page_of
from funitel.router.api.batches.schema import BatchList, BatchObject, CreateBatchRequest, ListBatchesQuery
from funitel.router.api.common.body import json_answer, query_of, read_body
from funitel.router.api.common.handler import service_of
from funitel.router.batch.formats import new_id
from funitel.router.batch.records import BatchStatus, StoredBatch
from funitel.router.batch.store import BatchStore

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_SECONDS = 7 * 86_400
CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


async def create(http: HttpRequest) -> Response:
    """`POST /v1/batches`: begin a batch; its file is validated in the background."""
    opened, service = await batches_of(http).opened(), service_of(http)
    body = await read_body(http, CreateBatchRequest, service)
    window = int(body.completion_window[:-1]) * SECONDS[body.completion_window[-1]]
    if window > MAX_WINDOW_SECONDS:
        words = f"completion_window: must be at most {MAX_WINDOW_SECONDS // 86_400}d. Given: {body.completion_window}"
        raise InvalidRequest(words, "completion_window")
    now = int(time.time())
    batch = StoredBatch(
        id=new_id("batch_"),
        owner=owner_of(http),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window,
        metadata=body.metadata,
    )
    try:
        await opened.store(BatchStore.add_batch, batch)
    except LookupError:
        words = f"input_file_id: there is no file with id {body.input_file_id!r}"
        raise InvalidRequest(words, "input_file_id") from None
    opened.runner.take(batch)
    return json_answer(BatchObject.of(batch))


async def retrieve(http: HttpRequest) -> Response:
    """`GET /v1/batches/{batch_id}`: a batch and how far it is."""
    return json_answer(BatchObject.of(await _batch(http)))


async def list_batches(http: HttpRequest) -> Response:
    """`GET /v1/batches`: the batches of the key, the newest first, a page at a time."""
    store, query = (await batches_of(http).opened()).store, query_of(http, ListBatchesQuery)
    batches, has_more = await store(BatchStore.batches, owner_of(http), page_of(query.limit, query.after))
    listed = BatchList(
        data=[BatchObject.of(batch) for batch in batches],
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=has_more,
    )
    return json_answer(listed)


async def cancel(http: HttpRequest) -> Response:
    """`POST /v1/batches/{batch_id}/cancel`: start no more of its requests; results so far are kept."""
    batch = await _batch(http)
    if batch.status in CANCELLABLE:
        batch = await (await batches_of(http).opened()).runner.cancel(batch)
    if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        raise InvalidRequest(f"a batch that is {batch.status} cannot be cancelled", "batch_id")
    return json_answer(BatchObject.of(batch))


async def _batch(http: HttpRequest) -> StoredBatch:
    id: str = http.path_params["batch_id"]
    batch = await (await batches_of(http).opened()).store(BatchStore.batch, id, owner_of(http))
    if batch is None:
        raise NotFound(f"there is no batch with id {shortened(id, 128)!r}")
    return batch
