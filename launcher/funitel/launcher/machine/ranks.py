"""The ranks of one job on this machine: prepare, start, watch, stop. The agent of a worker and a Ray actor use it."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from funitel.launcher.machine.facts import interface_of, port_for
from funitel.launcher.machine.model_folder import download, shared_folder
from funitel.launcher.machine.rank_flags import check_flags, value_of
from funitel.launcher.machine.shard_process import ShardProcess
from funitel.launcher.worker_wire.messages import JobState, Prepare, Prepared, RankState, Start
from funitel.proto.errors import StartupError
from funitel.proto.process.python import module_command
from funitel.proto.process.version import version
from funitel.proto.security.tls import MutualTls

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSite:
    """Where ranks run.

    Attributes:
        address: that they listen on.
        tls: files by which they meet routers; None for plain connections.
        cores: that the ranks of a job share.
        gpus: that the ranks of this job have; empty where they compute on a CPU.
        cache_dir: for models.
        program: the model server.
    """

    address: str
    tls: MutualTls | None = None
    cores: int = 1
    gpus: tuple[str, ...] = ()
    cache_dir: str | None = None
    program: tuple[str, ...] = module_command("funitel.model_server")


OnErrorLine = Callable[[int, str], None]
OnEnd = Callable[[int, str], None]


class JobRanks:
    """The ranks of one job; `state` tells them."""

    def __init__(self, site: RankSite, order: Prepare, on_error_line: OnErrorLine, on_end: OnEnd) -> None:
        """Take an order.

        Args:
            site: where they run.
            order: what to prepare.
            on_error_line: called with the rank and each of its error lines.
            on_end: called with the rank and the reason when one has ended that was not stopped.
        """
        self.site = site
        self.order = order
        self._on_error_line = on_error_line
        self._on_end = on_end
        self._folder: Path | None = None
        self._ports: tuple[int, ...] = ()
        self._processes: dict[int, ShardProcess] = {}
        self._preparing: asyncio.Future[Prepared] | None = None
        self._is_stopping = False

    @property
    def state(self) -> JobState:
        """Its ranks, with the reasons of those that have ended."""
        ports = dict(zip(self.order.ranks, self._ports, strict=False))
        ranks = tuple(
            RankState(
                rank=rank,
                pid=process.pid,
                port=ports[rank],
                ended=process.exited.result() if process.exited.done() else None,
            )
            for rank, process in self._processes.items()
        )
        return JobState(id=self.order.job, model=self.order.model, replica=self.order.replica, ranks=ranks)

    async def prepare(self) -> Prepared:
        """Make the model present and find ports; `stop` ends it.

        Raises:
            StartupError: the model is not here and cannot be fetched, or the job was stopped meanwhile.
        """
        self._preparing = asyncio.ensure_future(self._prepare())
        try:
            return await self._preparing
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            raise StartupError(f"job {self.order.job} was stopped before it was prepared") from None

    async def _prepare(self) -> Prepared:
        order, site = self.order, self.site
        self._folder = shared_folder(order.model_id) if order.is_path else None
        if self._folder is None:
            flags = [] if order.revision is None else ["--revision", order.revision]
            flags += [] if site.cache_dir is None else ["--cache-dir", site.cache_dir]
            self._folder = await download(site.program, order.model_id, flags, dict(os.environ))
        wanted = order.ports if len(order.ports) == len(order.ranks) else (0,) * len(order.ranks)
        self._ports = _ports(site.address, wanted)
        return Prepared(
            version=version(),
            address=site.address,
            folder=str(self._folder),
            ports=self._ports,
            master_port=port_for(site.address, 0) if 0 in order.ranks else 0,
        )

    async def start(self, order: Start) -> JobState:
        """Start every rank; they load the model after this has returned.

        Raises:
            StartupError: a flag is not one of a shard, or a process cannot be started.
        """
        if self._folder is None or len(order.flags) != len(self.order.ranks):
            raise StartupError(f"job {order.job} is not prepared for {len(order.flags)} ranks")
        if self._processes:
            raise StartupError(f"job {order.job} was started before")
        for flags in order.flags:
            check_flags(flags)
        for index, (rank, flags) in enumerate(zip(self.order.ranks, order.flags, strict=True)):
            self._processes[rank] = self._process(order, index, rank, flags)
        try:
            await asyncio.gather(*(process.start() for process in self._processes.values()))
        except StartupError:
            await self.stop(0.0)
            raise
        for rank, process in self._processes.items():
            process.exited.add_done_callback(partial(self._ended, rank))
        return self.state

    def _ended(self, rank: int, task: "asyncio.Task[str]") -> None:
        if not self._is_stopping and not task.cancelled():
            self._on_end(rank, task.result())

    async def stop(self, grace_seconds: float) -> None:
        """Stop every rank, by force after `grace_seconds`."""
        self._is_stopping = True
        if self._preparing is not None and not self._preparing.done():
            self._preparing.cancel()
            await asyncio.wait({self._preparing})
        await asyncio.gather(*(process.stop(grace_seconds) for process in self._processes.values()))

    def kill(self) -> None:
        """End every rank at once."""
        for process in self._processes.values():
            process.kill()

    def _process(self, order: Start, index: int, rank: int, flags: Sequence[str]) -> ShardProcess:
        site = self.site
        is_alone = len(self.order.ranks) == order.world_size
        master = LOOPBACK if is_alone else order.master_addr
        num_threads = value_of(flags, "--num-threads")
        share = max(1, site.cores // len(self.order.ranks))
        own = [
            *("--listen", f"{_bracketed(site.address)}:{self._ports[index]}", "--exit-with-parent", str(os.getpid())),
            *("--rank", str(rank), "--world-size", str(order.world_size), "--local-rank", str(index)),
            *("--master-addr", master, "--master-port", str(order.master_port)),
        ]
        own += ["--sharded"] if order.world_size > 1 else []
        own += ["--most-threads", str(share)] if num_threads is None and not site.gpus else []
        own += [] if site.cache_dir is None else ["--cache-dir", site.cache_dir]
        own += [] if site.tls is None else _tls_flags(site.tls)
        environ = dict(os.environ) | _torch_variables(num_threads or str(share))
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(index), "WORLD_SIZE": str(order.world_size)}
        environ |= {"MASTER_ADDR": master, "MASTER_PORT": str(order.master_port)}
        environ |= {"CUDA_VISIBLE_DEVICES": ",".join(site.gpus)} if site.gpus else {}
        if not is_alone and (interface := interface_of(site.address)) is not None:
            environ |= {name: interface for name in INTERFACES if name not in environ}
        argv = [*site.program, "serve", str(self._folder), *flags, *own]
        name = f"{self.order.model} replica {self.order.replica} shard rank {rank}"
        return ShardProcess(name, argv, environ, lambda line: self._on_error_line(rank, line))


def _ports(address: str, wanted: Sequence[int]) -> tuple[int, ...]:
    """A free port for each; the wanted ones where they are free, and different ones."""
    found: list[int] = []
    for port in wanted:
        free = port_for(address, port)
        while free in found:
            free = port_for(address, 0)
        found.append(free)
    return tuple(found)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _tls_flags(tls: MutualTls) -> list[str]:
    return ["--shard-tls-cert", tls.pair.cert, "--shard-tls-key", tls.pair.key, "--shard-tls-ca", tls.ca]


def _torch_variables(num_threads: str) -> dict[str, str]:
    """Variables that torch, NCCL and OpenMP read before flags are parsed."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # a spinning barrier would occupy the core that its last thread needs
        "OMP_NUM_THREADS": num_threads,
        "MKL_NUM_THREADS": num_threads,
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def on_gpus(site: RankSite, gpus: tuple[str, ...]) -> RankSite:
    """The site of a job that has these GPUs."""
    return replace(site, gpus=gpus)
