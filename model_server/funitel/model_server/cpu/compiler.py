"""The system's C++ compiler, and what it is told for each source of the C++ step and each instruction set.

The standard library is all that this module needs: the build of a wheel imports it too.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off")
STEP = "engine.cpp"

# Best first: (name, what /proc/cpuinfo must list, what the compiler is told).
INSTRUCTION_SETS: tuple[tuple[str, frozenset[str], tuple[str, ...]], ...] = tuple(
    (name, frozenset(flags.split()), tuple(f"-m{flag.replace('_', '')}" for flag in flags.split()))
    for name, flags in (
        ("avx512-vnni", "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni"),
        ("avx512", "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"),
        ("avx2", "avx2 fma f16c"),
    )
)


class CannotBuild(Exception):
    """Why there is no fused step on this machine; one line."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A source of `SOURCES`, compiled for one of `INSTRUCTION_SETS`.

    `engine_*.cpp` belong to `engine.cpp`: each is compiled by itself, beside the others.
    """

    source: str
    instruction_set: str

    @property
    def paths(self) -> list[Path]:
        """The source, and those that belong to it."""
        path = SOURCES / self.source
        return [path, *sorted(SOURCES.glob(f"{path.stem}_*.cpp"))]

    @property
    def suffix(self) -> str:
        """What the names of its functions end in, see `entry.h`."""
        return self.instruction_set.replace("-", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        """What the compiler is told."""
        machine = next(flags for name, _, flags in INSTRUCTION_SETS if name == self.instruction_set)
        namespace = f"{Path(self.source).stem}_{self.suffix}"
        return (*FLAGS, *machine, f"-DINSTRUCTION_SET={self.suffix}", f"-Dfunitel={namespace}")

    def digest(self) -> str:
        """Of the flags, the source and all headers."""
        digest = hashlib.sha256("\n".join(self.flags).encode())
        for path in [*sorted(SOURCES.glob("*.h")), *self.paths]:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def choose_target(source: str, has: Collection[str], asked: str | None) -> CompileTarget:
    """The best instruction set among those that a CPU `has`, or the one that is `asked` for.

    Raises:
        CannotBuild: the CPU lacks it.
    """
    for name, needs, _ in INSTRUCTION_SETS:
        if needs <= set(has) and asked in (None, name):
            return CompileTarget(source, name)
    raise CannotBuild(f"the CPU lacks {asked or 'AVX2, FMA or F16C'}")


def find_compiler() -> str:
    """Path of the system's C++ compiler. Raises: `CannotBuild`."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise CannotBuild(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    return found


def compile_objects(
    compiler: str, targets: Iterable[CompileTarget], folder: Path
) -> dict[CompileTarget, list[Path] | CannotBuild]:
    """Compile all sources of the targets into object files in `folder`, one on each CPU of this process at a time.

    Returns:
        The object files of each target, or why the first of them could not be made.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = {
            target: [pool.submit(_compile_object, compiler, target, path, folder) for path in target.paths]
            for target in targets
        }
    found: dict[CompileTarget, list[Path] | CannotBuild] = {}
    for target, tasks in begun.items():
        try:
            found[target] = [task.result() for task in tasks]
        except CannotBuild as error:
            found[target] = error
    return found


def _compile_object(compiler: str, target: CompileTarget, source: Path, folder: Path) -> Path:
    path = folder / f"{source.stem}_{target.suffix}.o"
    run_compiler([compiler, *target.flags, "-c", str(source), "-o", str(path)])
    return path


def run_compiler(command: Sequence[str]) -> None:
    """Compile or link. Raises: `CannotBuild`, with the first error that the compiler reports."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise CannotBuild(f"{command[0]} failed: {reason}")
