"""The batches of one router: take the folder, open its store, run its batches, and give the folder back.

Another router may have the folder, such as the one that hands its port over to this one: it is asked for until it is
free. Event loop only.
"""

import asyncio
import logging
from pathlib import Path

from funitel.proto.errors import FunitelError, NotFound, NotReady, StorageFailed
from funitel.router.batch.folder import BatchFolder
from funitel.router.batch.room import Room
from funitel.router.batch.runner import BatchRunner, Execute, RunnerLimits
from funitel.router.batch.store import BatchStore, StoreThread
from funitel.router.fleet.models import ServedModels

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
NO_FOLDER = "files and batches need a folder to be kept in: start the server with --batch-dir FOLDER"


class OpenBatches:
    """The folder that this process has, with its store and its runner."""

    def __init__(self, folder: BatchFolder, store: StoreThread, runner: BatchRunner) -> None:
        self.folder = folder
        self.store = store
        self.runner = runner


class Batches:
    """Files and batches of one router; none without `--batch-dir`."""

    def __init__(self, models: ServedModels, execute: Execute) -> None:
        self._models = models
        self._execute = execute
        settings = models.own.settings
        self._folder = None if settings.batch_dir is None else BatchFolder(Path(settings.batch_dir))
        self._room = Room(settings.max_concurrent_requests)
        self._open: OpenBatches | None = None
        self._why_closed = ""
        self._is_decided = asyncio.Event()  # whether the folder can be had

    async def opened(self) -> OpenBatches:
        """Return the folder with its store and runner, once it is known whether this process has it.

        Raises:
            NotFound: no folder is given.
            NotReady: this process does not have it yet, or any more.
        """
        if self._folder is None:
            raise NotFound(NO_FOLDER)
        await self._is_decided.wait()
        if self._open is None:
            raise NotReady(self._why_closed)
        return self._open

    async def run(self) -> None:
        """Take the folder and run its batches, until cancelled or until another router takes over."""
        if self._folder is None:
            return
        folder = self._folder
        if not await self._take(folder):
            return
        try:
            await self._serve(folder)
        except StorageFailed as error:
            self._close(error.message)
        finally:
            folder.release()

    async def _take(self, folder: BatchFolder) -> bool:
        """Wait for the lock of the folder; False where the folder cannot be used."""
        try:
            while not await asyncio.to_thread(folder.lock):
                words = f"--batch-dir {folder.root}: another router has it; it is taken once that one ends"
                if self._why_closed != words:
                    self._close(words)
                await asyncio.sleep(RETRY_SECONDS)
        except StorageFailed as error:
            self._close(f"{error.message}: {folder.root}")
            return False
        return True

    def _close(self, why: str) -> None:
        logger.error("%s", why)
        self._why_closed = why
        self._open = None
        self._is_decided.set()

    async def _serve(self, folder: BatchFolder) -> None:
        store = StoreThread(await asyncio.to_thread(BatchStore, folder.database))
        try:
            await asyncio.to_thread(folder.tidy, await store(BatchStore.file_ids))
            settings = self._models.own.settings
            limits = RunnerLimits(settings.max_batch_requests, lambda: self._models.payload_limit)
            runner = BatchRunner(store, folder, self._execute, self._has_room, limits, self._models.metrics)
            self._open = OpenBatches(folder, store, runner)
            self._is_decided.set()
            await self._run_until_handed_over(runner)
        finally:
            self._why_closed = "the folder of --batch-dir is closed: the server ends"
            self._open = None
            await store.close()

    async def _run_until_handed_over(self, runner: BatchRunner) -> None:
        """Run batches until another router takes over the port: it runs what is under way again."""
        running = asyncio.create_task(runner.run())
        try:
            while not self._is_handed_over and not running.done():
                await asyncio.wait([running], timeout=RETRY_SECONDS)
        finally:
            running.cancel()
            ended = await asyncio.gather(running, return_exceptions=True)
        if isinstance(ended[0], FunitelError):
            raise ended[0]
        if isinstance(ended[0], Exception):
            logger.error("batches are not run any more", exc_info=ended[0])

    @property
    def _is_handed_over(self) -> bool:
        drain = self._models.drain
        return drain.ends_connections and not drain.has_begun

    def _has_room(self, num_in_flight: int) -> bool:
        drain = self._models.drain
        if drain.has_begun or drain.ends_connections or not self._models.is_started:
            return False
        generating = [each for each in self._models.services if each.is_started and not each.is_encoder]
        views = [view for service in generating for view in service.engine.views.values()]
        return self._room.has_room(num_in_flight, views)
