"""`funitel worker`: run the agent until a signal, or until the control plane refuses it."""

import asyncio
import os

from funitel.launcher.worker.agent import Agent
from funitel.launcher.worker.settings import WorkerSettings
from funitel.proto.extras import check_extra
from funitel.proto.process import logs


def run_worker(settings: WorkerSettings) -> None:
    """Offer this machine.

    Raises:
        FunitelError: the settings are wrong, or the control plane refuses this worker; with the reason.
    """
    logs.configure("worker", json_output=settings.json_output, level=settings.log_level)
    check_extra("server", "a worker")
    settings.check_cores()
    if settings.cores is not None:  # shards inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.cores])
    asyncio.run(Agent(settings).run())
