"""Shards of an `LLM` in processes of their own: started, reached over Unix sockets, and ended with it."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import StartupError
from funitel.proto.process.python import module_command
from funitel.proto.process.usable_cores import count_usable_cores
from funitel.proto.settings.fields import to_argv
from funitel.router.shard_client.shards import Shards

POLL_SECONDS = 0.1  # between two looks at whether a shard has ended
CONNECT_SECONDS = 1.0  # of one attempt to reach them
STOP_SECONDS = 15.0  # after which a shard that was asked to end is killed


class ShardProcesses:
    """One process for each rank. They end with the thread that starts them."""

    def __init__(self, folder: Path, settings: ModelServerSettings, num_shard: int, environ: Mapping[str, str]) -> None:
        """Start the ranks of the model in `folder` with `environ`; they load it while this returns."""
        self._work = Path(tempfile.mkdtemp(prefix="funitel-llm-"))  # sockets and logs, for this user only
        self._path = self._work / "shard"
        self._processes: list[subprocess.Popen[bytes]] = []
        threads = settings.num_threads or max(1, count_usable_cores() // num_shard)
        self._environ = {
            **environ,
            "OMP_WAIT_POLICY": "PASSIVE",  # a spinning barrier would occupy the core that its last thread needs
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        flags = replace(
            settings,
            sharded=True,
            world_size=num_shard,
            master_port=_free_port(),
            uds_path=str(self._path),
            num_threads=threads,
            exit_with_parent=os.getpid(),
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            for rank in range(num_shard):
                self._start(folder, replace(flags, rank=rank))
            undo.pop_all()

    def _start(self, folder: Path, settings: ModelServerSettings) -> None:
        command = [
            *module_command("funitel.model_server"),
            "serve",
            str(folder),
            *to_argv(settings, skip=["model_id"]),
        ]
        with self._log(settings.rank).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,  # Ctrl-C cancels a call of the LLM, and does not end its shards
            )
        self._processes.append(process)

    async def connect(self) -> Shards:
        """Wait until every rank has loaded its share, and connect to them.

        Raises:
            StartupError: a rank has ended; the message is its own.
        """
        while True:
            self._check()
            try:
                return await Shards.connect(f"unix://{self._path}-0", CONNECT_SECONDS)
            except StartupError:
                self._check()
                await asyncio.sleep(POLL_SECONDS)

    def _check(self) -> None:
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                raise StartupError(f"shard {rank} ended with {code} while it loaded: {_last_line(self._log(rank))}")

    def _log(self, rank: int) -> Path:
        return self._work / f"{rank}.log"

    def close(self) -> None:
        """End the processes and remove their files; idempotent."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()
        shutil.rmtree(self._work, ignore_errors=True)

    @property
    def pids(self) -> Sequence[int]:
        """The processes, in rank order."""
        return [process.pid for process in self._processes]


def _free_port() -> int:
    """A port that nothing listens on, for torch.distributed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"
