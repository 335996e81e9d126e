"""Make a model present: run `download-weights` in a process of its own, and follow how far it is."""

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from funitel.launcher.config.child_commands import download_environ
from funitel.launcher.lifecycle.server import ServerFacts
from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.relay import parse_record, relay
from funitel.launcher.processes.watched import WatchedProcess, how_it_ended
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import LaunchFailed

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
_FETCHING = ("downloading", "unpacking", "hashing")  # first words of what is not a conversion


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far one piece of the work is; `total_bytes` is 0 where it is unknown."""

    label: str
    done_bytes: int
    total_bytes: int

    @property
    def converts(self) -> bool:
        """Whether the model is being converted, after it was fetched."""
        return not self.label.startswith(_FETCHING)

    @property
    def fraction(self) -> float:
        """Share that is done, 0..1."""
        return min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 0.0


async def fetch(
    server: ServerFacts, settings: LauncherSettings, name: str, log: Path, on_progress: Callable[[FetchProgress], None]
) -> Path:
    """The folder of a model, fetched and converted where it is not there yet.

    When the call is cancelled the process ends, and unfinished files of this model are removed.

    Raises:
        LaunchFailed: the process failed; the message is its last error.
        FunitelError: it could not be started.
    """
    folder: list[str] = []
    log_line = relay(f"{name} download", json_output=settings.json_output)

    def on_line(line: str) -> None:
        progress = _progress_of(line)
        if progress is not None:
            on_progress(progress)
            return
        if parse_record(line) is None and line.startswith("/"):
            folder.append(line)
        else:
            log_line(line)

    argv = server.commands.download(settings, reports_progress=True)
    tail = FileTail(log, on_line)
    process = WatchedProcess.started_as("download", argv, download_environ(settings, server.environ), log)
    tail.start()
    try:
        await asyncio.wait({process.exited})
    finally:
        if not process.has_exited:
            await _discard(process)
        tail.stop()
    code = process.exited.result()
    if code or not folder:
        raise LaunchFailed(tail.error or f"{how_it_ended('the download', code)}: {tail.last_line}")
    return Path(folder[-1])


async def _discard(process: WatchedProcess) -> None:
    """End a download that is not wanted any more; SIGUSR1 has it remove what is unfinished."""
    process.send(signal.SIGUSR1)
    stopping = asyncio.create_task(_end(process))
    await asyncio.shield(stopping)


async def _end(process: WatchedProcess) -> None:
    await asyncio.wait({process.exited}, timeout=GRACE_SECONDS)
    if not process.has_exited:
        process.kill()
        await asyncio.wait({process.exited})


def _progress_of(line: str) -> FetchProgress | None:
    """The progress that a line reports; None for any other line."""
    if not line.startswith('{"progress":'):
        return None
    try:
        content = json.loads(line)["progress"]
        return FetchProgress(str(content["label"]), int(content["bytes"]), int(content["total_bytes"]))
    except (ValueError, LookupError, TypeError):
        return None
