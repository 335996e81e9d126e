"""Make a model present on this machine: its own download, or a folder that is shared with the control plane."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from funitel.launcher.machine.shard_process import ERROR
from funitel.proto.errors import StartupError

STOP_SECONDS = 10.0  # for a download to leave its files in order


def shared_folder(path: str) -> Path | None:
    """The folder of a model that is given as a path; None for a file, which is converted first.

    Raises:
        StartupError: it is not on this machine.
    """
    found = Path(path)
    if not found.exists():
        raise StartupError(
            f"the model folder {path} is missing here: share it under the same path, or launch the model by its "
            "catalogue name or hub repository"
        )
    return found if found.is_dir() else None


async def download(program: Sequence[str], model_id: str, flags: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Fetch a model by `funitel-server download-weights`; its folder.

    Raises:
        StartupError: it cannot be fetched; with the reason.
    """
    process = await asyncio.create_subprocess_exec(
        *(*program, "download-weights", model_id, *flags, "--exit-with-parent", str(os.getpid())),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    finally:
        await _ended(process)
    lines = out.decode(errors="replace").split("\n")
    folder = next((line for line in reversed(lines) if line.strip()), "")
    if process.returncode != 0 or not folder:
        said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix(ERROR) for line in said if line.startswith(ERROR)]
        reason = (errors or said or [f"the download ended with code {process.returncode}"])[-1]
        raise StartupError(f"{model_id} cannot be fetched: {reason}")
    return Path(folder)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Stop a download that was cancelled."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
            return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
