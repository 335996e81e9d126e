"""The actor of one rank on a node of a Ray cluster: starts a shard as its child process and watches it.

Ray places the actor and tells when its node is gone. What the shard computes does not pass through Ray.
"""

import asyncio
import os
from importlib import import_module
from typing import Any

from funitel.launcher.machine.ranks import JobRanks, RankSite
from funitel.launcher.worker_wire.messages import Prepare, Start
from funitel.proto.errors import FunitelError
from funitel.proto.security.tls import MutualTls, Pair

Answer = dict[str, Any]  # {"body": ...}, or {"error": "one line"}: no class of ours is pickled


class RankActor:
    """One rank; its methods run on one event loop."""

    def __init__(self, address: str, num_cores: int, files: tuple[str, str, str] | None, cache_dir: str | None) -> None:
        """Describe the site of the rank.

        Args:
            address: of this node; found by Ray where it is empty.
            num_cores: of its bundle.
            files: certificate, key and authorities for its shard, which are files of this node.
            cache_dir: for models.
        """
        self._address = address
        self._num_cores = num_cores
        self._tls = None if files is None else MutualTls(Pair(files[0], files[1], "--worker-tls"), files[2])
        self._cache_dir = cache_dir
        self._job: JobRanks | None = None
        self._end: asyncio.Future[str] | None = None  # made on the event loop, on which this is not called

    async def prepare(self, order: dict[str, Any]) -> Answer:
        """Make the model present and find ports; see `Prepare`."""
        self._end = asyncio.get_running_loop().create_future()
        address = self._address or str(import_module("ray").util.get_node_ip_address())
        gpus = tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        site = RankSite(address=address, tls=self._tls, cores=self._num_cores, gpus=gpus, cache_dir=self._cache_dir)
        self._job = JobRanks(site, Prepare.model_validate(order), lambda rank, line: None, self._ended)
        try:
            return {"body": (await self._job.prepare()).model_dump(mode="json")}
        except (FunitelError, OSError) as error:
            return {"error": str(error)}

    async def start(self, order: dict[str, Any]) -> Answer:
        """Start the shard; see `Start`."""
        assert self._job is not None, "it is prepared first"
        try:
            return {"body": (await self._job.start(Start.model_validate(order))).model_dump(mode="json")}
        except (FunitelError, OSError) as error:
            return {"error": str(error)}

    def _ended(self, rank: int, reason: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)

    async def state(self) -> Answer:
        """The job, with the reason once its shard has ended."""
        return {"body": None if self._job is None else self._job.state.model_dump(mode="json")}

    async def ended(self) -> str:
        """Wait for the end of the shard; the reason."""
        assert self._end is not None, "it is prepared first"
        return await asyncio.shield(self._end)

    async def stop(self, grace_seconds: float) -> None:
        """Stop the shard, by force after `grace_seconds`."""
        if self._job is not None:
            await self._job.stop(grace_seconds)
