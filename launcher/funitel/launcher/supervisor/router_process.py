"""The router of a deployment: started, started again when it ends, and replaced in place by another process."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from funitel.launcher.processes.restart_policy import STEADY_ROUTER_SECONDS, RestartPolicy
from funitel.launcher.supervisor.keeper_process import KeeperProcess
from funitel.launcher.supervisor.process import Child
from funitel.proto.errors import OtherKeeper
from funitel.proto.keeper.messages import FINISHED_CODE

logger = logging.getLogger(__name__)

REPLACEMENT_GRACE_SECONDS = 2.0
MAX_LAST_RESTARTS = 2  # in a row, of a router that dies while it finishes its requests

MakeRouter = Callable[[int, bool], Child]
"""Describes a router, by the descriptor that it writes to once it is ready, and whether it accepts clients before."""


class ServingRouter:
    """The router of one deployment.

    Attributes:
        current: its process; None before the first start.
    """

    def __init__(
        self,
        make: MakeRouter,
        max_restarts: int,
        keeper: KeeperProcess | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the router.

        Args:
            make: describes a process.
            max_restarts: in a row.
            keeper: of its connections; without one the router is not started again.
            on_change: called after a change of `processes`.
        """
        self.current: Child | None = None
        self._make = make
        self._max_restarts = max_restarts
        self._keeper = keeper
        self._on_change = on_change
        self._replacement: Child | None = None
        self._finishing: Child | None = None  # without a keeper, before another one can be started
        self._replace_requested = asyncio.Event()
        self._is_ending = self._is_killed = False
        self._num_finishes = 0
        self._last_restarts = RestartPolicy(min(max_restarts, MAX_LAST_RESTARTS), STEADY_ROUTER_SECONDS)
        self._has_started = asyncio.Event()  # the current process: a signal before would end it without its requests
        self._has_started.set()

    @property
    def running(self) -> Child:
        """Its process."""
        assert self.current is not None, "the router was not started"
        return self.current

    @property
    def is_refused(self) -> bool:
        """Whether its process has ended because the keeper is of another version."""
        return self.current is not None and self.current.has_exited and self.current.code == OtherKeeper.exit_code

    @property
    def _has_finished(self) -> bool:
        """Whether its process has ended because the next keeper is of another version, after its last connection."""
        code = self.running.code
        return code == FINISHED_CODE or (self.running is self._finishing and code is None)

    @property
    def processes(self) -> list[Child]:
        """All of its processes: two during a replacement."""
        return [child for child in (self.current, self._replacement) if child is not None]

    async def start(self, *, accepts_early: bool) -> int:
        """Start the first process; returns the descriptor, the caller's, that can be read once it is ready."""
        if self._keeper is not None:
            await self._keeper.until_listening()
        with self._ready_pipe() as (read_end, write_end):
            child = self._make(write_end, accepts_early)
            await child.start()
        self.current = child
        self._on_change()
        return read_end

    def adopt(self, child: Child) -> None:
        """Go on with the process of an earlier launcher."""
        self.current = child

    @contextmanager
    def _ready_pipe(self) -> Iterator[tuple[int, int]]:
        """A pipe; the read end is left open, unless the `with` fails."""
        with ExitStack() as stack:
            read_end, write_end = os.pipe()
            stack.callback(os.close, read_end)
            try:
                yield read_end, write_end
            finally:
                os.close(write_end)
            stack.pop_all()

    # Service --------------------------------------------------------------------------------------------------------

    def request_replacement(self) -> None:
        """Have another process take over, if there is a keeper; the current one serves until then."""
        if self._keeper is None:
            logger.error("without --keeper true the router cannot be replaced")
        else:
            self._replace_requested.set()

    async def replace_keeper(self) -> None:
        """Have the keeper replaced by one of the installed version."""
        assert self._keeper is not None, "it has refused a router"
        await self._keeper.replace()

    async def serve(self) -> str:
        """Start the router again whenever it ends, and replace it when asked to; returns the reason of the last end.

        Once it is to end it is left to `finish`.
        """
        restarts = RestartPolicy(self._max_restarts, STEADY_ROUTER_SECONDS)
        ready, was_refused = time.monotonic(), False
        while True:
            requested = asyncio.create_task(self._replace_requested.wait())
            await asyncio.wait({self.running.exited, requested}, return_when=asyncio.FIRST_COMPLETED)
            requested.cancel()
            if not self.running.has_exited:
                self._replace_requested.clear()
                await self._replace()
                continue
            reason, ended = self.running.exit_reason(), time.monotonic()
            if self._is_ending:
                await asyncio.Event().wait()
            if self._keeper is None:
                return reason
            is_refused = self.is_refused and not was_refused
            if is_refused:
                count = "beside another keeper"
                await self.replace_keeper()
            elif self._has_finished:
                count = "beside another keeper"
                logger.info("the router has finished its connections")
            else:
                delay = restarts.delay_after(ended - ready)
                if delay is None:
                    return reason + (f"; restarted {self._max_restarts} times in a row" if self._max_restarts else "")
                count = f"restart {restarts.num_in_a_row} of {self._max_restarts}"
                logger.error("%s; %s in %g s", reason, count, delay)
                await asyncio.sleep(delay)
            if self._is_ending:
                await asyncio.Event().wait()
            await self._start_again(ended, count)
            ready, was_refused = time.monotonic(), is_refused

    async def _start_again(self, ended: float, count: str) -> None:
        """Start another process, and wait until it serves or ends."""
        self._has_started.clear()
        read_end = await self.start(accepts_early=False)
        try:
            if await _is_ready(read_end, self.running):
                logger.warning("the router answers again after %.1f s (%s)", time.monotonic() - ended, count)
        finally:
            self._has_started.set()
            os.close(read_end)

    async def _replace(self) -> None:
        """Start another process, which has the current one end; where it fails, that serves on."""
        logger.info("another router is started, which takes over from the current one")
        began, old = time.monotonic(), self.running
        with self._ready_pipe() as (read_end, write_end):
            fresh = self._make(write_end, False)
            await fresh.start()
            self._replacement = fresh
            self._on_change()
        try:
            await asyncio.wait({fresh.exited, old.exited}, return_when=asyncio.FIRST_COMPLETED)
            self._replacement = None
            if fresh.has_exited and not old.has_exited and fresh.code == OtherKeeper.exit_code:
                self._finishing = old
                await self.replace_keeper()
                return
            if fresh.has_exited and not old.has_exited:
                logger.error("the router was not replaced, it serves on: %s", fresh.exit_reason())
                return
            self.current = fresh
            self._has_started.clear()
            self._on_change()
            if await _is_ready(read_end, fresh):
                logger.info("the router was replaced in %.1f s", time.monotonic() - began)
        finally:
            self._has_started.set()
            os.close(read_end)

    # End ------------------------------------------------------------------------------------------------------------

    async def begin_end(self) -> None:
        """Start no further process; one that was to replace the current one is stopped."""
        self._is_ending = True
        fresh, self._replacement = self._replacement, None
        if fresh is not None and fresh is not self.current:
            await fresh.stop(REPLACEMENT_GRACE_SECONDS)

    async def finish(self, tell: Callable[[Child], None], *, follows: bool) -> None:
        """Have the router finish its requests, and return once it has ended; a later call does so in place of this one.

        Args:
            tell: sends a process the signal to finish.
            follows: whether another one takes over from one that dies meanwhile, and finishes in its place.
        """
        self._num_finishes = number = self._num_finishes + 1
        await self.begin_end()
        while True:
            await self._has_started.wait()
            child, began = self.running, time.monotonic()
            tell(child)
            await asyncio.wait({child.exited})
            await self._wait_unless_last(number)
            delay = self._delay_after(child, time.monotonic() - began) if follows else None
            if delay is None:
                return
            await asyncio.sleep(delay)
            await self._wait_unless_last(number)
            logger.error("%s; another router takes over, to finish its requests", child.exit_reason())
            await self._start_again(time.monotonic(), "to finish")

    async def _wait_unless_last(self, number: int) -> None:
        """Return for the last call of `finish` only, so that one router follows."""
        if number != self._num_finishes:
            await asyncio.Event().wait()

    def _delay_after(self, child: Child, seconds: float) -> float | None:
        """Seconds until another router takes over from one that has ended; None where it has left nothing to take."""
        ended_well = child.code in (0, None, FINISHED_CODE, OtherKeeper.exit_code)
        if ended_well or self._is_killed or self._keeper is None:
            return None
        return self._last_restarts.delay_after(seconds)

    def kill(self) -> None:
        """End every process at once."""
        self._is_killed = True
        for child in self.processes:
            child.kill()


async def _is_ready(descriptor: int, router: Child) -> bool:
    """Return True once a router has written to its pipe, False once it has ended."""
    told = asyncio.create_task(until_readable(descriptor))
    try:
        await asyncio.wait({told, router.exited}, return_when=asyncio.FIRST_COMPLETED)
        return told.done()
    finally:
        told.cancel()
        await asyncio.wait({told})


async def until_readable(descriptor: int) -> None:
    """Return once a child has written to the pipe; never if it ends first."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(descriptor)
    if not os.read(descriptor, 1):
        await asyncio.Event().wait()
