"""Shards as processes, without launcher and router."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from funitel_testing.servers import free_port


@contextmanager
def shards(model: Path, socket: Path, count: int, *flags: str) -> Iterator[None]:
    """Shards alone, without a router, until the end of the `with`."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "funitel.model_server",
        "serve",
        str(model),
        "--sharded",
        "--uds-path",
        str(socket),
    ]
    settings = ["--world-size", str(count), "--master-port", port, "--dtype", "float32", "--num-threads", "1", *flags]
    processes = []
    with (socket.parent / "shards.log").open("wb") as log:
        for rank in range(count):
            argv = [*command, *settings, "--rank", str(rank)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            processes.append(subprocess.Popen(argv, env=environ, stderr=log, stdout=log))
        try:
            yield
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
