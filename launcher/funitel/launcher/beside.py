"""Further models beside the one of the command line: a control plane in the event loop of the launcher."""

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.records import ModelEntry, ModelState, ReplicaEntry, ReplicaStage
from funitel.launcher.lifecycle.composition import ControlPlane
from funitel.launcher.lifecycle.resources.machine_memory import memory_of
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.supervisor import Supervisor
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MEASURE_SECONDS = 30.0
# Settings of the model of the command line, which further models do not share.
_ONE_MODEL = (
    "revision",
    "num_shard",
    "sharded",
    "quantize",
    "model_spec",
    "rope_scaling",
    "rope_factor",
    "lora_adapters",
    "draft_model",
    "tokenizer_config_path",
    "max_input_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_total_tokens",
    "max_batch_prefill_tokens",
)


async def manage_models(
    supervisor: Supervisor, settings: LauncherSettings, environ: Mapping[str, str], folders: Folders, commands: Commands
) -> None:
    """Manage models until the task is cancelled; then stop them. The model of the command line is shown among them.

    Without the control plane the server goes on, with its one model.
    """
    try:
        plane = ControlPlane(of_further_models(settings), environ, folders, commands, outlives=False)
    except FunitelError as error:
        logger.error("no further models can be launched: %s", error.message)
        return
    try:
        follower = StaticModel(supervisor)
        plane.fleet.set_static(follower.entry())
        await plane.start()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            plane.fleet.set_static(follower.entry())
    except FunitelError as error:
        logger.error("no further models can be launched: %s", error.message)
    finally:
        await plane.stop()
        if folders.state is None:
            await asyncio.to_thread(shutil.rmtree, folders.run, ignore_errors=True)


def of_further_models(settings: LauncherSettings) -> LauncherSettings:
    """The settings that further models begin with: those of the server, and none of its first model."""
    defaults = LauncherSettings()
    changes = {name: getattr(defaults, name) for name in _ONE_MODEL}
    return replace(settings, served_model_name=None, num_replicas=1, **changes)


class StaticModel:
    """The model of the command line, as an entry."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Follow a supervisor that is ready."""
        self._supervisor = supervisor
        self._created = time.time()
        self._measured_at = 0.0
        self._bytes: int | None = None

    def entry(self) -> ModelEntry:
        """What the supervisor runs now, after an upgrade the new deployment."""
        deployment = self._supervisor.current
        assert deployment is not None, "the supervisor is ready"
        settings = deployment.settings
        replicas = tuple(
            ReplicaEntry(
                id=number,
                address=replica.address,
                state=ReplicaStage.LOST if replica.has_ended else ReplicaStage.READY,
                pids=replica.pids,
            )
            for number, replica in enumerate(deployment.replicas)
        )
        if time.monotonic() - self._measured_at > MEASURE_SECONDS:
            self._measured_at = time.monotonic()
            self._bytes = memory_of(pid for replica in replicas for pid in replica.pids)
        return ModelEntry(
            name=settings.served_model_name,
            model_id=settings.model_id,
            state=ModelState.READY,
            created=self._created,
            progress=1.0,
            task=settings.task,
            is_static=True,
            is_default=True,
            pinned=True,
            bytes=self._bytes,
            load_seconds=self._supervisor.load_seconds,
            router={},
            replicas=replicas,
        )
