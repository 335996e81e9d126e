"""Write constraints.txt and constraints-lowest.txt from pyproject.toml by uv; `--check` compares them with its bounds.

constraints.txt has one release of every package of all extras, for each Python and platform that is served.
constraints-lowest.txt has the lowest releases that pyproject.toml allows of what serving needs, and what fits them.
Both leave the index to the settings of the machine that installs.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
NEWEST = ROOT / "constraints.txt"
LOWEST = ROOT / "constraints-lowest.txt"
LOWEST_EXTRAS = ("server", "otlp", "oidc", "av")
# The release that all tests ran with. pyproject.toml says which others were tried.
TORCH = "torch==2.13.0"

HEADERS = {
    NEWEST: "One release of every package of all extras: pip install --constraint constraints.txt '.[server]'",
    LOWEST: "The lowest releases that pyproject.toml allows, but for torch, which is that of constraints.txt",
}
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^ ;]+)( ; .+)?")


def requirements() -> dict[str, list[Requirement]]:
    """The requirements of pyproject.toml: of each extra, and of "" for those of every installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in lists.items()}


def write(path: Path, *options: str) -> None:
    """Resolve pyproject.toml with uv into a file of constraints."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command += ["--constraint", "-", "pyproject.toml", *options]
    environ = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}  # builds of this machine
    result = subprocess.run(command, cwd=ROOT, env=environ, input=f"{TORCH}\n", capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {result.stderr.strip()}")
    lines = result.stdout.splitlines()
    if path == LOWEST:
        lines = [line for line in lines if not re.match(r"torch==|triton==|nvidia-|cuda-", line)]
    path.write_text("\n".join([f"# {HEADERS[path]}. Written by `make lock`.", *lines, ""]))


def pins(path: Path) -> dict[str, list[Version]]:
    """The releases that a file of constraints has of each package."""
    found: dict[str, list[Version]] = {}
    for line in path.read_text().splitlines()[1:]:
        match = PIN.fullmatch(line)
        if match is None:
            sys.exit(f"error: {path.name} has a line that is not NAME==VERSION: {line}")
        found.setdefault(canonicalize_name(match[1]), []).append(Version(match[2]))
    return found


def lowest_allowed(requirement: Requirement) -> Version | None:
    """The lower bound of a requirement."""
    return next((Version(part.version) for part in requirement.specifier if part.operator in (">=", "==")), None)


def faults() -> Iterator[str]:
    """What in the files of constraints does not fit pyproject.toml."""
    newest, lowest = pins(NEWEST), pins(LOWEST)
    for extra, wanted in requirements().items():
        for requirement in wanted:
            name = canonicalize_name(requirement.name)
            if not newest.get(name):
                yield f"constraints.txt has no {name}"
            for version in newest.get(name, []):
                if version not in requirement.specifier:
                    yield f"constraints.txt has {name} {version}, pyproject.toml asks for {requirement.specifier}"
            if extra in ("", *LOWEST_EXTRAS) and name != "torch":
                bound, (pinned, *_) = lowest_allowed(requirement), lowest.get(name) or (None,)
                if pinned is None or pinned != bound:
                    yield f"constraints-lowest.txt has {name} {pinned}, the lower bound of pyproject.toml is {bound}"


def main() -> int:
    """Write the files, or check them."""
    if sys.argv[1:] != ["--check"]:
        every = [word for extra in requirements() if extra for word in ("--extra", extra)]
        write(NEWEST, "--universal", "--fork-strategy", "fewest", "--upgrade", *every)
        lowest = [word for extra in LOWEST_EXTRAS for word in ("--extra", extra)]
        write(LOWEST, "--resolution", "lowest-direct", *lowest)
    found = list(faults())
    for fault in found:
        print(f"error: {fault}; change the bound, or run make lock", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
