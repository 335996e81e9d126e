"""Build the repository's Dockerfile with buildah; the base is made by mmdebstrap where no registry can be reached."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from funitel_testing import debian

ROOT = Path(__file__).parents[3]
TOOLS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "runc": "runc"}  # program: Debian package
PULL_SECONDS = 60.0
BASE = "localhost/funitel-base"
# What Debian's `slim` images leave out as well.
_WITHOUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_BUD = ("bud", "--isolation", "chroot", "--format", "docker")  # of the OCI's format, an image has no health check
_BUNDLE = "/run/pip-certificates.crt"  # where a build finds this machine's authorities


class CannotBuild(Exception):
    """Why no image can be built on this machine; one line."""


def install_tools() -> None:
    """Install what is missing of `TOOLS`. Raises: `CannotBuild`."""
    if os.geteuid() != 0:
        raise CannotBuild("images are built and run by root only")
    try:
        debian.install(TOOLS)
    except debian.CannotInstall as error:
        raise CannotBuild(str(error)) from error


def _run(command: Sequence[str], *, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, input=stdin, errors="replace")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


@dataclass(frozen=True)
class Image:
    """An image: its root file system, mounted, and its configuration in Docker's form."""

    root: Path
    config: dict[str, Any]


class Builder:
    """buildah with a storage of its own below `folder`, which `remove` deletes."""

    def __init__(self, folder: Path, cache: Path) -> None:
        """Choose overlay, or vfs, which copies each layer whole, where overlay cannot be mounted.

        Args:
            folder: for storage.
            cache: where the archive of the base is kept for the next time.
        """
        self._folder = folder
        self._cache = cache
        self.driver = "overlay"
        try:
            self.buildah("rm", self.buildah("from", "scratch"))
        except AssertionError:
            self.driver = "vfs"

    def buildah(self, *words: str) -> str:
        """Run buildah and return its output; fail with the last of it."""
        done = _run([*self._command(), *words])
        if done.returncode != 0:
            raise AssertionError(f"buildah {words[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout.strip()

    def _command(self) -> list[str]:
        storage = ["--root", str(self._folder / "storage"), "--runroot", str(self._folder / "run")]
        return ["buildah", *storage, "--storage-driver", self.driver]

    def base(self) -> str:
        """Name of the base: the Dockerfile's own if it can be pulled, else one made from this machine's mirror.

        Raises:
            CannotBuild: neither works here.
        """
        (default,) = re.findall(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        try:
            pulled = subprocess.run(
                [*self._command(), "pull", "-q", default], capture_output=True, timeout=PULL_SECONDS
            )
            if pulled.returncode == 0:
                return str(default)
        except subprocess.TimeoutExpired:
            pass
        container = self.buildah("from", "scratch")
        self.buildah("add", container, str(self._archive()), "/")
        self.buildah("commit", "--rm", container, BASE)
        return BASE

    def _archive(self) -> Path:
        """The base as an archive; from the cache, if one was made of the same sources."""
        suite, source = _apt_source()
        options = ["--variant=minbase", *(f"--dpkgopt=path-exclude={path}" for path in _WITHOUT)]
        options += ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"', "--include=ca-certificates"]
        digest = hashlib.sha256("\n".join((*options, source)).encode()).hexdigest()[:16]
        archive = self._cache / f"base-{digest}.tar"
        if not archive.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            scratch = archive.with_suffix(f".{os.getpid()}.tar")
            done = _run(["mmdebstrap", *options, suite, str(scratch), "-"], stdin=source)
            if done.returncode != 0:
                scratch.unlink(missing_ok=True)
                raise CannotBuild(f"mmdebstrap failed: {_last_line(done.stderr)}")
            scratch.rename(archive)
        return archive

    def build(self, base: str, tag: str) -> None:
        """Build the Dockerfile from the files that git tracks, as they are in the working tree."""
        self.buildah(*_BUD, "--build-arg", f"BASE={base}", *pip_options(self._folder), "--tag", tag, self._context())

    def build_stage(self, stage: str, image: str, tag: str) -> None:
        """Build one stage of the Dockerfile on an image, which saves the stages before it."""
        text = (ROOT / "Dockerfile").read_text()
        (instructions,) = re.findall(rf"^FROM serving AS {stage}\n(.*?)^FROM ", text, re.MULTILINE | re.DOTALL)
        file = self._folder / f"Dockerfile.{stage}"
        file.write_text(f"FROM {image}\n{instructions}")
        self.buildah(*_BUD, "--file", str(file), "--tag", tag, self._context())

    def _context(self) -> str:
        """A copy of the tracked files."""
        context = self._folder / "context"
        if not context.exists():
            context.mkdir(parents=True)
            tracked = _run(["git", "-C", str(ROOT), "ls-files", "-z"]).stdout.split("\0")
            present = "\0".join(name for name in tracked if name and (ROOT / name).is_file())
            subprocess.run(["tar", "-C", str(context), "-x"], input=_tar(present), check=True)
        return str(context)

    def image(self, tag: str) -> Image:
        """Mount an image and read its configuration."""
        config = json.loads(self.buildah("inspect", "--type", "image", tag))["Docker"]["config"]
        return Image(Path(self.buildah("mount", self.buildah("from", "--pull-never", tag))), config)

    def remove(self) -> None:
        """Remove all containers and images, and the storage."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self._folder)


def _tar(names: str) -> bytes:
    command = ["tar", "-C", str(ROOT), "--null", "-T", "-", "-c"]
    return subprocess.run(command, input=names.encode(), capture_output=True, check=True).stdout


def _apt_source() -> tuple[str, str]:
    """(suite, line for sources.list) of this machine's first Debian source. Raises: `CannotBuild`."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        fields = dict(re.findall(r"^(\w[\w-]*): *(.+)$", path.read_text(), re.MULTILINE)[::-1])
        if "main" in fields.get("Components", "").split():
            suite, uri = fields["Suites"].split()[0], fields["URIs"].split()[0]
            signed = f"[signed-by={fields['Signed-By']}] " if "Signed-By" in fields else ""
            return suite, f"deb {signed}{uri} {suite} main\n"
    for line in Path("/etc/apt/sources.list").read_text().splitlines():
        if found := re.match(r"deb (\[[^]]*\] )?(\S+) (\S+) .*\bmain\b", line):
            return found[3], f"{line}\n"
    raise CannotBuild("this machine has no source of Debian packages")


def pip_options(folder: Path) -> list[str]:
    """Options that give a build this machine's settings of pip: a secret file, and the folders that it names."""
    lines = _run([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    values: dict[str, str] = {}
    for line in lines:  # later ones take precedence
        name, _, value = line.partition("=")
        values[name.removeprefix(":env:").rpartition(".")[2]] = ast.literal_eval(value)
    wanted = {k: v for k, v in values.items() if k in ("index-url", "extra-index-url", "find-links", "timeout")}
    volumes = {}
    for word in " ".join(wanted.values()).split():
        place = urlsplit(word)
        if place.scheme in ("", "file") and place.path.startswith("/"):
            kept = Path(place.path).parent if place.path.endswith("/simple") else Path(place.path)
            volumes[str(kept)] = str(kept)
    if "cert" in values:
        wanted["cert"], volumes[values["cert"]] = _BUNDLE, _BUNDLE
    settings = folder / "pip.conf"
    settings.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in wanted.items()))
    mounted = [word for host, inside in volumes.items() for word in ("--volume", f"{host}:{inside}:ro")]
    return ["--secret", f"id=pip,src={settings}", *mounted]
