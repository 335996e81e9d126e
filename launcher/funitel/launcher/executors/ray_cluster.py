"""A connection to a Ray cluster. Every call of Ray is made on one thread, since they block.

Ray is imported there too: on the main thread it would take over SIGTERM, which is the event loop's.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from funitel.launcher.executors.choose import RAY, Place
from funitel.launcher.executors.ray_actor import RankActor
from funitel.proto.errors import StartupError
from funitel.proto.extras import check_extra

logger = logging.getLogger(__name__)

NAMESPACE = "funitel"
CONNECT_SECONDS = 30.0
T = TypeVar("T")


class RayCluster:
    """The cluster that a node of this machine belongs to."""

    def __init__(self, address: str) -> None:
        """Take the address of the cluster: HOST:PORT of its head, or `auto` for the one of this machine."""
        self.address = address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._ray: Any = None

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function on Ray's thread; `ray` is connected there.

        Raises:
            MissingPackage: Ray is not installed.
            StartupError: no cluster can be reached.
        """
        loop = asyncio.get_running_loop()
        if self._ray is None:
            check_extra("ray", "executor ray")
            await loop.run_in_executor(self._thread, self._connect)
        return await loop.run_in_executor(self._thread, partial(work, *arguments))

    def _connect(self) -> None:
        if self._ray is not None:
            return
        ray = import_module("ray")
        try:
            ray.init(
                address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
                configure_logging=False, ignore_reinit_error=True,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise StartupError(
                f"no Ray cluster at {self.address}: {_first_line(error)} (start a node of it on this machine by "
                "ray start)"
            ) from error
        self._ray = ray

    async def close(self) -> None:
        """Leave the cluster; actors run on."""
        if self._ray is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._ray.shutdown)
            self._ray = None
        self._thread.shutdown(wait=False)

    # On Ray's thread --------------------------------------------------------------------------------------------

    def reserve(self, name: str, bundles: Sequence[Mapping[str, float]]) -> Any:
        """Make a placement group; it may have to wait for room."""
        return self._ray.util.placement_group(
            [dict(bundle) for bundle in bundles], strategy="PACK", name=name, lifetime="detached"
        )

    def is_reserved(self, group: Any, seconds: float) -> bool:
        """Whether a placement group has its room, after so many seconds at most."""
        return bool(group.wait(timeout_seconds=seconds))

    def lack(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """What is wanted and what is free, in one line."""
        free = self._ray.available_resources()
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in bundles[0]}
        parts = [f"{amount:g} {name} ({free.get(name, 0):g} free)" for name, amount in wanted.items()]
        return f"{len(bundles)} bundles of {_amounts(bundles[0])} want {', '.join(parts)} on {nodes} nodes"

    def release(self, name: str) -> None:
        """Remove a placement group, and with it what still runs in it."""
        try:
            group = self._ray.util.get_placement_group(name)
        except ValueError:  # there is none
            return
        self._ray.util.remove_placement_group(group)

    def place(self, name: str, group: Any, index: int, bundle: Mapping[str, float], arguments: Sequence[Any]) -> Any:
        """Make a detached actor in a bundle."""
        strategies = import_module("ray.util.scheduling_strategies")
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        }
        return self._ray.remote(RankActor).options(**options).remote(*arguments)

    def actor(self, name: str) -> Any:
        """An actor by its name; None where there is none."""
        try:
            return self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def ask(self, actor: Any, method: str, *arguments: Any) -> "asyncio.Future[Any]":
        """Begin a call; the result is a `concurrent.futures.Future`."""
        future: asyncio.Future[Any] = getattr(actor, method).remote(*arguments).future()
        return future

    def kill(self, actor: Any) -> None:
        """End an actor at once, with its shard."""
        self._ray.kill(actor, no_restart=True)

    def place_of_cluster(self) -> Place:
        """The cluster as a place, for `choose`."""
        free = self._ray.available_resources()
        total = self._ray.cluster_resources()
        return Place(
            name=RAY,
            executor=RAY,
            cores=int(free.get("CPU", 0)),
            free_bytes=int(free.get("memory", 0)),
            num_gpus=int(total.get("GPU", 0)),
            free_gpus=int(free.get("GPU", 0)),
        )


def _amounts(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
