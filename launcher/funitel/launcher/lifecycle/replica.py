"""One replica of a model: started or adopted, watched, restarted when it is lost, stopped."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from funitel.launcher.control_plane.records import ReplicaEntry, ReplicaStage
from funitel.launcher.executors.interface import Executor, ReplicaJob, RunningReplica
from funitel.launcher.processes.restart_policy import RestartPolicy
from funitel.proto.errors import FunitelError, LaunchFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
RESTART_GRACE_SECONDS = 2.0  # for shards that have lost a peer: they may hang, and streams wait for the restart
IDLE_GRACE_SECONDS = 10.0  # for shards that load: they have no work to finish, and may hang
CHECK_SECONDS = 2.0
MAX_CHECK_SECONDS = 10.0  # counted for one check: beyond that, this process itself was suspended


async def to_its_end(work: Awaitable[None]) -> None:
    """Carry out work that must not stop half-way; a cancellation of the caller is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


class ManagedReplica:
    """The shards of one replica, over all of their restarts.

    Attributes:
        entry: what is shown of it, and by what it is adopted.
        attached: set while the router uses it.
        released: set once the router no longer does.
        attach_error: why the router could not use it.
    """

    def __init__(
        self,
        entry: ReplicaEntry,
        job: ReplicaJob,
        executor: Executor,
        *,
        facts: Mapping[str, Any],
        max_restarts: int,
        on_change: Callable[[], None],
        on_event: Callable[[str], None],
        on_restart: Callable[[], None],
        on_gone: Callable[["ManagedReplica", str], None],
    ) -> None:
        """Prepare the replica.

        Args:
            entry: the first one.
            job: what is started.
            executor: that starts it.
            facts: that its record has besides, for an adoption.
            max_restarts: restarts in a row.
            on_change: called when the entry has changed.
            on_event: called with a line for the history of the model.
            on_restart: called when it is restarted.
            on_gone: called with the reason when it is lost for good.
        """
        self.entry = entry
        self.attached = asyncio.Event()
        self.released = asyncio.Event()
        self.attach_error: str | None = None
        self._job = job
        self._executor = executor
        self._facts = facts
        self._max_restarts = max_restarts
        self._on_change = on_change
        self._on_event = on_event
        self._on_restart = on_restart
        self._on_gone = on_gone
        self._running: RunningReplica | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether the router has it, or may have it."""
        return self.entry.state in (ReplicaStage.READY, ReplicaStage.LOST)

    def change(self, **changes: Any) -> None:
        """Change the entry."""
        self.entry = replace(self.entry, **changes)
        self._on_change()

    async def start(self) -> None:
        """Start the shards and return once they answer; then they are watched.

        Raises:
            FunitelError: they ended before, or could not be started.
        """
        await self._start()
        await self._until_answers()
        self._serve()

    async def adopt(self) -> bool:
        """Find shards that an earlier control plane has started; return whether they run.

        Those that serve or sleep are watched from now on; `resume` waits for those that still load.
        """
        self._running = await self._executor.adopt(self.entry.record) if self.entry.record else None
        if self._running is None:
            return False
        self._describe(self._running)
        if self.entry.state in (ReplicaStage.READY, ReplicaStage.LOST, ReplicaStage.SLEEPING):
            sleeps = self.entry.state is ReplicaStage.SLEEPING
            self._serve(ReplicaStage.SLEEPING if sleeps else ReplicaStage.READY)
        return True

    async def resume(self) -> None:
        """Wait until adopted shards answer, and watch them; raises LaunchFailed where they end before."""
        if self._keeping is None:
            await self._until_answers()
            self._serve()

    def _serve(self, state: ReplicaStage = ReplicaStage.READY) -> None:
        self._keeping = asyncio.create_task(self._keep())
        self.change(state=state)

    async def _start(self) -> None:
        self._running = await self._executor.start(self._job)
        self._describe(self._running)

    def _describe(self, running: RunningReplica) -> None:
        """Show where it runs: its state is not changed."""
        record = {**running.record, **self._facts}
        self.change(address=running.address, pids=tuple(running.pids), worker=running.worker, record=record)

    async def _until_answers(self) -> None:
        running = self._running
        assert running is not None, "the replica was not started"
        while not await running.answers():
            await asyncio.wait({running.exited}, timeout=POLL_SECONDS)
            if running.exited.done():
                raise LaunchFailed(running.exited.result())

    async def _keep(self) -> None:
        """Restart the replica whenever it ends, until the maximum in a row."""
        restarts = RestartPolicy(self._max_restarts)
        answered: float | None = time.monotonic()  # None: it did not become ready
        reason = await self._end()
        while True:
            ended = time.monotonic()
            delay = restarts.delay_after(0.0 if answered is None else ended - answered)
            if delay is None or self.entry.state in (ReplicaStage.SLEEPING, ReplicaStage.DRAINING):
                count = f"; restarted {self._max_restarts} times in a row" if delay is None else ""
                self._on_gone(self, reason + (count if self._max_restarts else ""))
                return
            count = f"restart {restarts.num_in_a_row} of {self._max_restarts}"
            line = f"replica {self.entry.id} is lost: {reason}; {count} in {delay:g} s"
            logger.error("%s %s", self._job.model, line)
            self._on_event(line)
            self._on_restart()
            self.change(state=ReplicaStage.LOST, pids=())
            try:
                if self._running is not None:
                    await self._running.stop(RESTART_GRACE_SECONDS)
                await asyncio.sleep(delay)
                await self._start()
                await self._until_answers()
            except FunitelError as error:
                reason, answered = error.message, None
                continue
            answered = time.monotonic()
            line = f"replica {self.entry.id} answers again after {answered - ended:.1f} s ({count})"
            logger.warning("%s %s", self._job.model, line)
            self._on_event(line)
            self.change(state=ReplicaStage.READY)
            reason = await self._end()

    async def _end(self) -> str:
        """Wait until the shards have ended, on their own or because they hung, and say why."""
        running = self._running
        assert running is not None, "the replica was not started"
        max_seconds = self._job.settings.step_timeout_s
        pause, unresponsive = min(CHECK_SECONDS, max_seconds / 4), 0.0
        while not running.exited.done():
            began = time.monotonic()
            is_answering = await running.answers()
            await asyncio.wait({running.exited}, timeout=pause)
            seconds = min(time.monotonic() - began, MAX_CHECK_SECONDS)
            unresponsive = 0.0 if is_answering else unresponsive + seconds
            if unresponsive > max_seconds and not running.exited.done():
                title = f"{self._job.model} replica {self.entry.id}"
                logger.error("%s has not answered for %.0f s and is killed", title, unresponsive)
                running.kill()
                await asyncio.wait({running.exited})
        return running.exited.result()

    async def stop(self, grace_seconds: float) -> None:
        """Stop the shards; they are not restarted."""
        await self.forget()
        if self._running is not None:
            await self._running.stop(grace_seconds)

    def kill(self) -> None:
        """End the shards at once."""
        if self._running is not None:
            self._running.kill()

    async def forget(self) -> None:
        """Watch the shards no more."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
