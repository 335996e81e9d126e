"""Install Debian packages for tests of what only the whole system shows: browsers, image builders, Node.js."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

LOCK_SECONDS = 300  # that apt-get waits for another process that installs
_LOCK = Path(tempfile.gettempdir()) / "funitel-apt.lock"  # `update` fails at once where another one runs


class CannotInstall(Exception):
    """Why packages cannot be installed on this machine; one line."""


def install(programs: Mapping[str, str]) -> None:
    """Install by apt-get what is missing; test sessions that run at once wait for each other.

    Args:
        programs: by the name of each program, the package that has it.

    Raises:
        CannotInstall: this process is not root, or apt-get is missing or fails.
    """
    packages = [package for program, package in programs.items() if shutil.which(program) is None]
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotInstall(f"only root installs {', '.join(packages)}, and by apt-get")
    apt = ["apt-get", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}", "-o", "Acquire::Retries=3", "-q"]
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run([*apt, *words], capture_output=True, text=True, errors="replace", env=environ)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise CannotInstall(f"apt-get {words[0]} failed: {reason}")
