"""Write the output file and the error file of a batch from the results of its requests."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from funitel.router.batch.folder import BatchFolder, PartialFile
from funitel.router.batch.formats import EXPIRED, error_line, new_id
from funitel.router.batch.records import BatchStatus, RequestResult, StoredBatch, StoredFile
from funitel.router.batch.store import BatchStore, StoreThread

RESULTS_A_TURN = 200
PURPOSE = "batch_output"


async def write_output(store: StoreThread, folder: BatchFolder, batch: StoredBatch, status: BatchStatus) -> bool:
    """Write the results of a batch to files, and end it with `status`.

    Of a batch that has expired, what was not run is an error; of one that was cancelled it is left out. Until the store
    has the files, nothing refers to them, and a process that begins anew writes them anew.

    Returns False where the batch has ended meanwhile: it keeps the files it has.

    Raises:
        StorageFailed: the disk is full; the batch is as it was.
    """
    async with AsyncExitStack() as stack:
        parts = {is_success: await stack.enter_async_context(folder.writing()) for is_success in (True, False)}
        last, num_expired = 0, 0
        while rows := await store(BatchStore.results, batch.id, last, RESULTS_A_TURN):
            last = rows[-1].line
            num_expired += await asyncio.to_thread(_write, parts, rows, status)
        now = int(time.time())
        files = {}
        for is_success, part in parts.items():
            if part.num_bytes:
                name = f"{batch.id}_{'output' if is_success else 'error'}.jsonl"
                file = StoredFile(
                    id=new_id("file-"),
                    owner=batch.owner,
                    created_at=now,
                    num_bytes=part.num_bytes,
                    filename=name,
                    purpose=PURPOSE,
                )
                await asyncio.to_thread(part.keep, file.id)
                files[is_success] = file
    ended = replace(
        batch,
        status=status,
        output_file_id=files[True].id if True in files else None,
        error_file_id=files[False].id if False in files else None,
        num_failed=batch.num_failed + num_expired,
    )
    was_ended = await store(BatchStore.end_batch, ended, list(files.values()), now)
    if not was_ended:
        for file in files.values():
            await asyncio.to_thread(folder.remove, file.id)
    return was_ended


def _write(parts: dict[bool, PartialFile], rows: Sequence[RequestResult], status: BatchStatus) -> int:
    """Append results; returns how many requests have expired without one."""
    num_expired = 0
    for row in rows:
        content = row.content
        if content is None:
            if status is not BatchStatus.EXPIRED:
                continue
            num_expired += 1
            content = error_line(row.custom_id, EXPIRED, "the batch expired before this request was run")
        parts[row.is_success].write(content + b"\n")
    return num_expired
