"""The agent: keeps a connection to the control plane, answers its calls, stops its shards in order at the end.

Its shards run on while the connection is gone, and it says what runs when it connects again. They end with the agent.
"""

import asyncio
import logging
import signal
import uuid
from typing import Any

from funitel.launcher.machine.facts import check_own_address, memory_bytes, visible_gpus
from funitel.launcher.machine.ranks import RankSite
from funitel.launcher.worker.jobs import Jobs
from funitel.launcher.worker.settings import WorkerSettings
from funitel.launcher.worker_wire.handshake import JoinRefused, join
from funitel.launcher.worker_wire.link import Link
from funitel.launcher.worker_wire.messages import PROTOCOL, Hello
from funitel.proto.process.python import module_command
from funitel.proto.process.usable_cores import count_usable_cores
from funitel.proto.process.version import version
from funitel.proto.settings.fields import require

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.2, 2.0  # between two attempts to connect
OFFERED_SHARE = 0.85  # of the machine's memory, where --memory is not given
BEATS = 5  # heartbeats within the seconds after which silence is a loss
LEAVE_SECONDS = 2.0  # for the last words
MODEL_SERVER = module_command("funitel.model_server")


class Agent:
    """One worker, for the length of `run`."""

    def __init__(
        self, settings: WorkerSettings, *, program: tuple[str, ...] = MODEL_SERVER, own_version: str | None = None
    ) -> None:
        """Look at this machine.

        Args:
            settings: of the command.
            program: the model server.
            own_version: the installed one when not given.

        Raises:
            SettingsError: more is offered than there is, or an address is not one of this machine.
        """
        self._settings = settings
        self._program = program
        self._version = own_version or version()
        self._instance = uuid.uuid4().hex
        self._cores = min(count_usable_cores(), settings.cores or count_usable_cores())
        self._address = settings.listen or ""
        if settings.listen is not None:
            check_own_address(settings.listen, "--listen")
        self._link: Link | None = None
        self._timeout = 10.0
        self._stop_requested = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self.jobs = Jobs(
            gpus=_offered_gpus(settings.gpus),
            memory_bytes=_offered_memory(settings.memory),
            cores=self._cores,
            site=self._site,
            tell=self._tell,
        )

    def _site(self) -> RankSite:
        return RankSite(
            address=self._address,
            tls=self._settings.tls,
            cores=self._cores,
            cache_dir=self._settings.cache_dir,
            program=self._program,
        )

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._link is not None:
            self._link.send(kind, **fields)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; a second signal kills the shards.

        Raises:
            JoinRefused: the control plane refuses this worker, or it shows a certificate that is not valid here.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop)
        connecting = asyncio.create_task(self._stay_connected())
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()
        finally:
            stopping.cancel()
            await self._leave(connecting)

    def request_stop(self) -> None:
        """Stop the shards and end `run`; a second time the shards are killed."""
        if self._stop_requested.is_set():
            logger.warning("signalled again: killing every shard")
            self.jobs.kill_all()
        self._stop_requested.set()

    async def _leave(self, connecting: "asyncio.Task[None]") -> None:
        """Say goodbye, so that requests move at once, then stop the shards."""
        self._tell("leaving")
        await self.jobs.stop_all(self._settings.graceful_termination_timeout)
        if self._link is not None:
            await self._link.finish(LEAVE_SECONDS)
        for task in (connecting, *self._answering):
            task.cancel()
        await asyncio.gather(connecting, *self._answering, return_exceptions=True)

    # Connection -------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        delay, last_reason, was_connected = FIRST_DELAY_SECONDS, "", False
        while True:
            try:
                self._link, self._timeout = await join(self._settings.url, self._settings.tls, self._hello())
            except JoinRefused as error:
                if not (was_connected and error.is_tls):  # certificates may be being replaced
                    raise
                reason = error.message
            except OSError as error:
                reason = error.strerror or str(error) or "no answer in time"
            else:
                self._address = self._address or self._link.own_address
                logger.info("joined %s as %s", self._settings.url, self._settings.worker_name)
                was_connected, delay, last_reason = True, FIRST_DELAY_SECONDS, ""
                reason = await self._serve(self._link)
            if self._stop_requested.is_set():
                return
            if reason != last_reason:
                logger.warning("no connection to %s: %s; trying again", self._settings.url, reason)
                last_reason = reason
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    def _hello(self) -> Hello:
        return Hello(
            name=self._settings.worker_name,
            instance=self._instance,
            version=self._version,
            protocol=PROTOCOL,
            address=self._address,
            machine=self.jobs.machine,
            jobs=self.jobs.states,
        )

    async def _serve(self, link: Link) -> str:
        """Answer calls until the connection is gone; the reason."""
        beating = asyncio.create_task(self._beat(link))
        try:
            while (message := await link.receive(self._timeout)) is not None:
                if message.get("type") == "call":
                    self._start_answer(link, message)
            return "it was lost"
        finally:
            self._link = None
            beating.cancel()
            link.close()

    async def _beat(self, link: Link) -> None:
        while True:
            link.send("heartbeat", machine=self.jobs.machine.model_dump(mode="json"))
            await asyncio.sleep(self._timeout / BEATS)

    def _start_answer(self, link: Link, call: dict[str, Any]) -> None:
        async def answer() -> None:
            found = await self.jobs.answer(call)
            link.send("heartbeat", machine=self.jobs.machine.model_dump(mode="json"))  # first: what is free has changed
            link.send("answer", id=call.get("id"), **found)

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


def _offered_memory(asked: float | None) -> int:
    there = memory_bytes()
    if asked is None:
        return int(OFFERED_SHARE * there)
    require(asked * 2**30 <= there, f"--memory must be at most {there / 2**30:.1f} GiB, given {asked:g}")
    return int(asked * 2**30)


def _offered_gpus(asked: int | None) -> tuple[str, ...]:
    there = visible_gpus()
    require(asked is None or asked <= len(there), f"--gpus must be within 0..{len(there)}, given {asked}")
    return there if asked is None else there[:asked]
