"""The workers of a control plane: the port on which they join, their connections, what they run; asked by executors."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import socket
from typing import Any, TypeVar

from pydantic import ValidationError

from funitel.launcher.config.sockets import listen
from funitel.launcher.executors.choose import WORKER, Place
from funitel.launcher.settings.worker_port import WorkerPortSettings
from funitel.launcher.worker_wire.handshake import BadJoin, let_in, opened, read_join, refuse, server_side, tls_reason
from funitel.launcher.worker_wire.link import Link, WorkerCalls, WorkerLost, first_fault
from funitel.launcher.worker_wire.messages import (
    PROTOCOL,
    Hello,
    JobState,
    Machine,
    RankState,
    Stop,
    Stopped,
    WireMessage,
    check_worker_name,
)
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.process.version import version

logger = logging.getLogger(__name__)

BEATS = 5  # heartbeats within the seconds after which silence is a loss
UNCLAIMED_SECONDS = 60.0  # for a control plane that has just started to adopt what a worker runs already
UNCLAIMED_GRACE_SECONDS = 10.0
RETRY_SECONDS = 0.1
MAX_HANDSHAKES = 64  # at once; further connections are closed
T = TypeVar("T", bound=WireMessage)


@dataclass(eq=False, slots=True)
class _Worker:
    """One worker, connected or not; `jobs` is what it runs as far as it has told."""

    hello: Hello
    machine: Machine
    link: Link | None = None
    calls: WorkerCalls | None = None
    jobs: dict[str, JobState] = field(default_factory=dict)
    followers: dict[str, Callable[[str], None]] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    last_seen: float = 0.0
    is_leaving: bool = False
    loss: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        if self.link is not None:
            return "leaving" if self.is_leaving else "connected"
        return "away" if self.loss is not None else "lost"

    def tell(self, job: str, reason: str) -> None:
        if (follower := self.followers.get(job)) is not None:
            follower(reason)

    def tell_all(self, reason: str) -> None:
        for job in tuple(self.followers):
            self.tell(job, reason)


class Workers:
    """Every worker that has joined; a `WorkerPool` of the executor."""

    def __init__(self, settings: WorkerPortSettings, on_change: Callable[[], None] = lambda: None) -> None:
        """Take settings; `on_change` is called when a worker joins, is lost or leaves, and when a rank ends."""
        self.on_change = on_change
        self.port: int | None = None
        self.settings = settings
        self._workers: dict[str, _Worker] = {}
        self._joined = asyncio.Condition()
        self._listener: socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_handshakes = 0

    async def start(self) -> None:
        """Listen for workers, if there is a port.

        Raises:
            SettingsError: a file of TLS is wrong, or the port is taken.
        """
        if self.settings.worker_port is None:
            return
        self.settings.check_worker_port()
        if self.settings.worker_tls is not None:
            server_side(self.settings.worker_tls)
        self._listener = listen(self.settings.worker_address, self.settings.worker_port, "--worker-port")
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._listen_again()

    async def stop(self) -> None:
        """Close every connection; the workers run on and connect to the next control plane."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers.values():
            if worker.loss is not None:
                worker.loss.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def list(self) -> "list[dict[str, Any]]":
        """A record of each worker, by name."""
        return [
            {
                "name": name,
                "state": worker.state,
                "address": worker.hello.address,
                "version": worker.hello.version,
                **worker.machine.model_dump(mode="json"),
                "last_seen": worker.last_seen,
                "replicas": [_replica(job) for job in worker.jobs.values()],
            }
            for name, worker in sorted(self._workers.items())
        ]

    # What the executor asks -------------------------------------------------------------------------------------

    def places(self) -> Sequence[Place]:
        """Every worker as a place for ranks."""
        return [
            Place(
                name=name,
                executor=WORKER,
                cores=worker.machine.cores,
                free_bytes=worker.machine.free_bytes,
                num_gpus=len(worker.machine.gpus),
                free_gpus=worker.machine.free_gpus,
                obstacle="" if worker.state == "connected" else f"it is {worker.state}",
            )
            for name, worker in sorted(self._workers.items())
        ]

    async def call(self, worker: str, method: str, order: WireMessage, kind: type[T]) -> T:
        """Ask a worker.

        Raises:
            StartupError: it refuses; with its reason.
            WorkerLost: it is not connected.
        """
        found = self._workers.get(worker)
        if found is None or found.calls is None:
            raise WorkerLost(f"worker {worker} is not connected")
        answer = await found.calls.call(method, order, kind)
        if isinstance(order, Stop):
            found.jobs.pop(order.job, None)
            found.given_up.discard(order.job)
        self.on_change()
        return answer

    def follow(self, worker: str, job: str, on_end: Callable[[str], None]) -> None:
        """Have `on_end` called when a rank of a job ends or its worker is lost; at once if that has happened."""
        found = self._workers.get(worker)
        state = None if found is None else found.jobs.get(job)
        if found is None or state is None:
            on_end(f"worker {worker} does not have it")
            return
        found.followers[job] = on_end
        if (reason := _end_of(state)) is not None:
            on_end(reason)
        elif found.state == "lost":
            on_end(f"worker {worker} is lost")

    def give_up(self, worker: str, job: str) -> None:
        """No longer follow a job, and have it stopped when its worker connects again."""
        if (found := self._workers.get(worker)) is not None:
            found.followers.pop(job, None)
            found.given_up.add(job)

    async def find(self, worker: str, job: str) -> JobState | None:
        """What a worker has of a job, once it has joined; None where it does not join in time, or has no such job."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.worker_timeout), self._joined:
                await self._joined.wait_for(lambda: worker in self._workers and self._workers[worker].calls is not None)
        found = self._workers.get(worker)
        return None if found is None else found.jobs.get(job)

    # Connections ------------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self) -> None:
        """Take a connection that has come."""
        assert self._listener is not None
        loop, listener = asyncio.get_running_loop(), self._listener
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left for now
            loop.remove_reader(listener)
            loop.call_later(RETRY_SECONDS, self._listen_again)
            return
        connection.setblocking(False)
        if self._num_handshakes >= MAX_HANDSHAKES:
            connection.close()
            return
        self._run(self._meet(connection))

    def _listen_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _meet(self, connection: socket) -> None:
        """Let a worker in or refuse it, then listen to it until the connection is gone."""
        try:
            peer = str(connection.getpeername()[0])
        except OSError:  # it has gone already
            connection.close()
            return
        self._num_handshakes += 1
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await opened(connection, self.settings.worker_tls)
            hello = await self._hello(reader, writer, peer)
        except SettingsError as error:
            connection.close()
            logger.error("no worker can join: %s", error.message)
            return
        except (OSError, EOFError) as error:
            if writer is None:
                connection.close()
            else:  # by its transport: the loop would watch the descriptor on, which the next connection gets
                writer.transport.abort()
            logger.warning("a worker at %s is refused: %s", peer, tls_reason(error))
            return
        finally:
            self._num_handshakes -= 1
        if hello is not None:
            await self._listen_to(hello, Link(reader, writer))

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> Hello | None:
        """What a worker says first; None where it was refused."""
        name = ""
        try:
            hello = _parsed(await read_join(reader))
            name = f" {hello.name}"
            self._check(hello)
        except BadJoin as error:
            logger.warning("worker%s at %s is refused: %s", name, peer, error.message)
            await refuse(writer, error)
            return None
        let_in(writer, self.settings.worker_timeout)
        return hello

    def _check(self, hello: Hello) -> None:
        """Raise BadJoin for a worker that cannot be let in."""
        ours = (version(), PROTOCOL)
        if (hello.version, hello.protocol) != ours:
            raise BadJoin(
                f"it is funitel {hello.version} with protocol {hello.protocol}, the control plane is funitel {ours[0]} "
                f"with protocol {ours[1]}",
                426,
            )
        try:
            check_worker_name(hello.name)
        except ValueError as error:
            raise BadJoin(f"the name {error}") from error
        known = self._workers.get(hello.name)
        if known is not None and known.link is not None and known.hello.instance != hello.instance:
            raise BadJoin(f"the name {hello.name} is taken by the worker at {known.link.peer}", 409)

    async def _listen_to(self, hello: Hello, link: Link) -> None:
        worker = self._registered(hello, link)
        async with self._joined:
            self._joined.notify_all()
        self.on_change()
        beating = asyncio.ensure_future(self._beat(link))
        is_silent = False
        try:
            while (message := await link.receive(self.settings.worker_timeout)) is not None:
                worker.last_seen = time.time()
                self._take(worker, message)
            is_silent = time.time() - worker.last_seen >= self.settings.worker_timeout
        finally:
            beating.cancel()
            link.close()
            self._disconnected(worker, link, is_silent=is_silent)

    async def _beat(self, link: Link) -> None:
        while True:
            link.send("heartbeat")
            await asyncio.sleep(self.settings.worker_timeout / BEATS)

    def _registered(self, hello: Hello, link: Link) -> _Worker:
        """The worker of a connection that was let in; what it has lost meanwhile ends, what is unwanted is stopped."""
        worker = self._workers.get(hello.name)
        if worker is None:
            worker = self._workers[hello.name] = _Worker(hello, hello.machine)
        is_other = worker.hello.instance != hello.instance
        if worker.loss is not None:
            worker.loss.cancel()
        if worker.link is not None:
            worker.link.close()
        if worker.calls is not None:
            worker.calls.end()
        worker.hello, worker.machine, worker.loss, worker.is_leaving = hello, hello.machine, None, False
        worker.link, worker.calls = link, WorkerCalls(link, hello.name)
        worker.last_seen = time.time()
        worker.jobs = {job.id: job for job in hello.jobs}
        logger.info("worker %s at %s has joined, with %d jobs", hello.name, hello.address, len(hello.jobs))
        for job in tuple(worker.followers):
            if job not in worker.jobs:
                again = "has started again without it" if is_other else "does not have it any more"
                worker.tell(job, f"worker {hello.name} {again}")
            elif (reason := _end_of(worker.jobs[job])) is not None:
                worker.tell(job, f"worker {hello.name}: {reason}")
        worker.given_up &= worker.jobs.keys()
        for job in worker.jobs.keys() - worker.followers.keys():
            self._run(self._stop_unclaimed(worker, job, 0.0 if job in worker.given_up else UNCLAIMED_SECONDS))
        return worker

    async def _stop_unclaimed(self, worker: _Worker, job: str, seconds: float) -> None:
        """Stop a job that is not followed after so many seconds."""
        await asyncio.sleep(seconds)
        if job in worker.followers or job not in worker.jobs:
            return
        logger.warning("worker %s is told to stop %s, which is not wanted any more", worker.hello.name, job)
        with suppress(FunitelError):
            await self.call(worker.hello.name, "stop", Stop(job=job, grace_seconds=UNCLAIMED_GRACE_SECONDS), Stopped)

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        kind, name, job = message.get("type"), worker.hello.name, str(message.get("job"))
        if kind == "answer" and worker.calls is not None:
            with suppress(ValidationError):  # before the caller goes on: a rank may end at once
                state = JobState.model_validate(message.get("body"))
                worker.jobs[state.id] = state
            worker.calls.take(message)
        elif kind == "heartbeat":
            with suppress(ValidationError):
                worker.machine = Machine.model_validate(message.get("machine"))
        elif kind == "error_line":
            logger.warning("worker %s: rank %s of %s: %s", name, message.get("rank"), job, message.get("line"))
        elif kind == "ended":
            self._rank_ended(worker, job, message)
        elif kind == "leaving":
            logger.warning("worker %s stops", name)
            worker.is_leaving = True
            worker.tell_all(f"worker {name} stops")
            self.on_change()

    def _rank_ended(self, worker: _Worker, job: str, message: dict[str, Any]) -> None:
        reason, state = str(message.get("reason")), worker.jobs.get(job)
        if state is not None:
            ranks = [_ended(rank, reason) if rank.rank == message.get("rank") else rank for rank in state.ranks]
            worker.jobs[job] = state.model_copy(update={"ranks": tuple(ranks)})
        worker.tell(job, f"worker {worker.hello.name}: {reason}")
        self.on_change()

    def _disconnected(self, worker: _Worker, link: Link, *, is_silent: bool) -> None:
        if worker.link is not link:  # it has connected again already
            return
        if worker.calls is not None:
            worker.calls.end()
        worker.link = worker.calls = None
        if worker.is_leaving:
            del self._workers[worker.hello.name]
        elif is_silent:
            self._lose(worker)
        else:
            logger.warning("the connection of worker %s is gone", worker.hello.name)
            seconds = self.settings.worker_timeout
            worker.loss = asyncio.get_running_loop().call_later(seconds, self._lose, worker)
        self.on_change()

    def _lose(self, worker: _Worker) -> None:
        worker.loss = None
        reason = f"worker {worker.hello.name} is lost: nothing was heard of it for {self.settings.worker_timeout:g} s"
        logger.error("%s", reason)
        worker.tell_all(reason)
        self.on_change()


def _parsed(body: bytes) -> Hello:
    try:
        return Hello.model_validate_json(body)
    except ValidationError as error:
        raise BadJoin(first_fault(error)) from error


def _end_of(state: JobState) -> str | None:
    """Why a job has ended; None while all its ranks run."""
    return next((rank.ended for rank in state.ranks if rank.ended is not None), None)


def _ended(rank: RankState, reason: str) -> RankState:
    return rank.model_copy(update={"ended": reason})


def _replica(job: JobState) -> dict[str, Any]:
    ranks = [{"rank": rank.rank, "pid": rank.pid, "port": rank.port, "ended": rank.ended} for rank in job.ranks]
    return {"model": job.model, "replica": job.replica, "ranks": ranks}
