"""The jobs of an agent: what runs here, which GPUs and how much memory each has, and the calls that change it."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import ValidationError

from funitel.launcher.machine.facts import available_bytes
from funitel.launcher.machine.ranks import JobRanks, RankSite, on_gpus
from funitel.launcher.worker_wire.link import first_fault
from funitel.launcher.worker_wire.messages import (
    METHODS,
    JobState,
    Machine,
    Prepare,
    Prepared,
    Start,
    Stop,
    Stopped,
    WireMessage,
)
from funitel.proto.errors import FunitelError, StartupError

logger = logging.getLogger(__name__)

Tell = Callable[..., None]


class Jobs:
    """All jobs of one agent, by their id.

    Args:
        gpus: that are offered.
        memory_bytes: that are offered.
        cores: that are offered.
        site: where ranks run; asked for each job.
        tell: sends an object to the control plane, if it is connected.
    """

    def __init__(
        self, *, gpus: tuple[str, ...], memory_bytes: int, cores: int, site: Callable[[], RankSite], tell: Tell
    ) -> None:
        self._gpus = gpus
        self._memory_bytes = memory_bytes
        self._cores = cores
        self._site = site
        self._tell = tell
        self._jobs: dict[str, JobRanks] = {}
        self._methods: Mapping[str, Callable[[Any], Awaitable[WireMessage]]] = {
            "prepare": self._prepare,
            "start": self._start,
            "stop": self._stop,
        }

    @property
    def states(self) -> tuple[JobState, ...]:
        """Every job."""
        return tuple(job.state for job in self._jobs.values())

    @property
    def machine(self) -> Machine:
        """What is offered, and what of it is free."""
        promised = sum(job.order.rank_bytes * len(job.order.ranks) for job in self._jobs.values())
        free = max(0, min(self._memory_bytes - promised, available_bytes()))
        return Machine(
            cores=self._cores,
            memory_bytes=self._memory_bytes,
            free_bytes=free,
            gpus=self._gpus,
            free_gpus=len(self._free_gpus()),
        )

    def _free_gpus(self) -> tuple[str, ...]:
        taken = {gpu for job in self._jobs.values() for gpu in job.site.gpus}
        return tuple(gpu for gpu in self._gpus if gpu not in taken)

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a call asks for; its answer, which has an `error` where that is not possible."""
        method = call.get("method")
        if not isinstance(method, str) or method not in self._methods:
            return {"error": f"this worker knows no call {method!r}"}
        try:
            order = METHODS[method][0].model_validate(call.get("body"))
            return {"body": (await self._methods[method](order)).model_dump(mode="json")}
        except ValidationError as error:
            return {"error": f"{method}: {first_fault(error)}"}
        except FunitelError as error:
            return {"error": error.message}
        except OSError as error:
            return {"error": f"{method}: {error.strerror or error}"}

    async def _prepare(self, order: Prepare) -> Prepared:
        if order.job in self._jobs:
            raise StartupError(f"job {order.job} is here already")
        job = JobRanks(self._placed(order), order, self._on_error_line(order), self._on_end(order))
        self._jobs[order.job] = job
        prepared: Prepared | None = None
        try:
            prepared = await job.prepare()
            return prepared
        finally:
            if prepared is None:
                self._jobs.pop(order.job, None)

    def _placed(self, order: Prepare) -> RankSite:
        """The site of a job, with its GPUs; raises StartupError where there is no room."""
        needed, free = order.rank_bytes * len(order.ranks), self.machine.free_bytes
        if needed > free:
            raise StartupError(
                f"{len(order.ranks)} ranks of {order.model} need {_gib(needed)} GiB, {_gib(free)} GiB are free of the "
                f"{_gib(self._memory_bytes)} offered"
            )
        site = self._site()
        if order.device == "cpu" or not self._gpus:
            if order.device == "cuda":
                raise StartupError(f"{order.model} needs {len(order.ranks)} GPUs, none is offered")
            return site
        gpus = self._free_gpus()
        if len(gpus) < len(order.ranks):
            raise StartupError(
                f"{order.model} needs {len(order.ranks)} GPUs, {len(gpus)} of {len(self._gpus)} are free"
            )
        return on_gpus(site, gpus[: len(order.ranks)])

    async def _start(self, order: Start) -> JobState:
        job = self._jobs.get(order.job)
        if job is None:
            raise StartupError(f"job {order.job} is not here")
        state = await job.start(order)
        logger.info("started %s replica %d: %s", job.order.model, job.order.replica, _described(state))
        return state

    async def _stop(self, order: Stop) -> Stopped:
        job = self._jobs.get(order.job)
        if job is not None:
            await job.stop(order.grace_seconds)
            self._jobs.pop(order.job, None)
            logger.info("stopped %s replica %d", job.order.model, job.order.replica)
        return Stopped()

    async def stop_all(self, grace_seconds: float) -> None:
        """Stop every job, the newest first."""
        for job in reversed(tuple(self._jobs.values())):
            await job.stop(grace_seconds)

    def kill_all(self) -> None:
        """End every rank at once."""
        for job in self._jobs.values():
            job.kill()

    def _on_error_line(self, order: Prepare) -> Callable[[int, str], None]:
        return lambda rank, line: self._tell("error_line", job=order.job, rank=rank, line=line)

    def _on_end(self, order: Prepare) -> Callable[[int, str], None]:
        def ended(rank: int, reason: str) -> None:
            logger.error("%s", reason)
            self._tell("ended", job=order.job, rank=rank, reason=reason)

        return ended


def _described(state: JobState) -> str:
    return ", ".join(f"rank {rank.rank} pid {rank.pid} port {rank.port}" for rank in state.ranks)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
