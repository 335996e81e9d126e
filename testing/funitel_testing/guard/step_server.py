"""A shard of a tiny model that takes steps by its socket only, as a program: the fused step, its executor and its rim.

python -m funitel_testing.guard.step_server shard.steps MODEL
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from funitel.model_server.rpc.serve import CallServer
from funitel_testing.executors import load_executor


async def serve(path: str, model: str) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(1)
    executor = load_executor(Path(model), dtype=None)
    with ThreadPoolExecutor(1) as compute:
        server = CallServer(executor, 1, path, compute, lambda _: os._exit(1))
        await server.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
