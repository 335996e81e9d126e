"""Compile the C++ step with the system's compiler, once for each instruction set, compiler and version of the source.

What is built is kept in the cache folder under a name made of all three, so that hosts which share a home do not
disturb each other and an upgrade builds anew. Where there is no compiler, what any has built of this source will do.
"""

import atexit
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from funitel.model_server.files.atomic_folder import exclusive, install, scratch
from funitel.model_server.files.manifest import Damaged, has_manifest, verify, write_manifest

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=off")
LIBRARY = "funitel_cpu.so"
_BUILD_BYTES = 1 << 24  # of the disk, at most, for a build
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


def build(cache_dir: Path, instruction_set: str | None = None, *, source: str = STEP) -> Path:
    """Return the library for this CPU, compiled if it is not yet in `cache_dir`.

    Args:
        cache_dir: where libraries are kept, in a folder of their own; if it cannot be written, what is built is gone
            when this process ends.
        instruction_set: name of a set the CPU has; the best one when not given.
        source: file that is compiled, with the headers beside it.

    Raises:
        CannotBuild: the CPU lacks AVX2, there is no compiler and nothing built before, or it failed.
    """
    name, flags = _choose(cpu_flags(), instruction_set)
    stem = f"{name}-{_source_digest(flags, source)}"
    try:
        compiler = find_compiler()
    except CannotBuild:
        folders = sorted(path.parent for path in (cache_dir / "cpu").glob(f"{stem}-*/{LIBRARY}"))
        found = next(filter(_is_sound, folders), None)
        if found is None:
            raise
        return found / LIBRARY
    command = [compiler, *FLAGS, *flags]
    target = cache_dir / "cpu" / f"{stem}-{_compiler_digest(compiler)}"
    library = target / LIBRARY
    if _is_sound(target):
        return library
    try:
        with exclusive(target):
            if not _is_sound(target):
                if has_manifest(target):
                    logger.warning("%s is damaged; the fused CPU step is built again", target)
                with scratch(target) as folder:
                    # A name of its own: the compiler of a process that was killed may still be writing.
                    done = folder / f"done-{os.getpid()}"
                    _compile(command, source, done / LIBRARY)
                    write_manifest(done)
                    install(done, target)
        return library
    except OSError as error:
        logger.warning("the fused CPU step cannot be kept in %s: %s", cache_dir, error.strerror)
    except CannotBuild:
        if shutil.disk_usage(target.parent).free >= _BUILD_BYTES:
            raise
        logger.warning("the fused CPU step cannot be kept in %s: no space left", cache_dir)
    folder = Path(tempfile.mkdtemp(prefix="funitel-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _compile(command, source, folder / LIBRARY)


def _is_sound(folder: Path) -> bool:
    """Whether a folder has its library as it was built; loading a damaged one would end this process."""
    if not has_manifest(folder):  # there is none, or it is of an older version
        return False
    try:
        verify(folder)
    except Damaged as error:
        logger.info("%s", error)
        return False
    return (folder / LIBRARY).is_file()


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU by their names in /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def find_compiler() -> str:
    """Path of the system's C++ compiler. Raises: `CannotBuild`."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise CannotBuild(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    return found


def _choose(has: Collection[str], asked: str | None) -> tuple[str, tuple[str, ...]]:
    for name, needs, flags in INSTRUCTION_SETS:
        if needs <= set(has) and asked in (None, name):
            return name, flags
    raise CannotBuild(f"the CPU lacks {asked or 'AVX2, FMA or F16C'}")


def _compiler_digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    return hashlib.sha256(compiler.encode() + b"\n" + version.stdout).hexdigest()[:8]


def _source_digest(flags: Sequence[str], source: str) -> str:
    digest = hashlib.sha256("\n".join((*FLAGS, *flags)).encode())
    for path in [*sorted(SOURCES.glob("*.h")), SOURCES / source]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: list[str], source: str, library: Path) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    logger.info("building the fused CPU step source=%s compiler=%s folder=%s", source, command[0], library.parent)
    begin = time.monotonic()
    done = subprocess.run(
        [*command, str(SOURCES / source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise CannotBuild(f"{command[0]} failed: {reason}")
    logger.info("built the fused CPU step seconds=%.1f", time.monotonic() - begin)
    return library
