"""`funitel-router` as a process of its own, over a scripted engine: a token each tenth of a second, or no start."""

import asyncio
import os

from fakes import FakeEngine

from funitel.proto.errors import StartupError
from funitel.router import __main__ as router
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


async def connect(settings: RouterSettings, metrics: Metrics) -> FakeEngine:
    """What the variable FAKE says: fail, hang, or work."""
    match os.environ.get("FAKE"):
        case "fail":
            await asyncio.sleep(0.3)
            raise StartupError("no shard answers")
        case "hang":
            await asyncio.sleep(60.0)
    return FakeEngine(pieces=("a",) * 10, pause=0.1)


if __name__ == "__main__":
    router.connect = connect  # type: ignore[assignment]
    router.main()
