"""Open the C++ step: the library of the wheel, or one compiled with the system's compiler at first use.

What is compiled is kept in the cache folder under a name made of instruction set, compiler and version of the source,
so that hosts which share a home do not disturb each other and an upgrade builds anew. Where there is no compiler, what
any has built of this source will do.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funitel.model_server.cpu.compiler import (
    STEP,
    CannotBuild,
    CompileTarget,
    choose_target,
    compile_objects,
    find_compiler,
    run_compiler,
)
from funitel.model_server.cpu.prebuilt import find_prebuilt
from funitel.model_server.files.atomic_folder import exclusive, install, scratch
from funitel.model_server.files.manifest import Damaged, has_manifest, verify, write_manifest

logger = logging.getLogger(__name__)

LIBRARY = "funitel_cpu.so"
_BUILD_BYTES = 1 << 24  # of the disk, at most, for a build

Functions = Mapping[str, tuple[Any, Sequence[Any]]]
"""Result and arguments of each function of a C interface."""


def open_library(
    cache_dir: Path, functions: Functions, instruction_set: str | None = None, *, source: str = STEP
) -> ctypes.CDLL:
    """Load what `source` was compiled to for this CPU, and declare its functions.

    Args:
        cache_dir: where `build` keeps libraries.
        functions: by their names without the suffix of the instruction set.
        instruction_set: name of a set the CPU has; the best one when not given.

    Raises:
        CannotBuild: see `build`.
        OSError: what was built cannot be loaded.
    """
    target = choose_target(source, cpu_flags(), instruction_set)
    library = _load_prebuilt(target) or ctypes.CDLL(str(build(cache_dir, target.instruction_set, source=source)))
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"{name}_{target.suffix}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


def _load_prebuilt(target: CompileTarget) -> ctypes.CDLL | None:
    path = find_prebuilt(target)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("the prebuilt CPU step cannot be loaded: %s", error)
        return None
    logger.info("prebuilt CPU step source=%s instruction_set=%s", target.source, target.instruction_set)
    return library


def build(cache_dir: Path, instruction_set: str | None = None, *, source: str = STEP) -> Path:
    """Return a library for this CPU, compiled if it is not yet in `cache_dir`.

    Args:
        cache_dir: where libraries are kept, in a folder of their own; if it cannot be written, what is built is gone
            when this process ends.
        instruction_set: name of a set the CPU has; the best one when not given.
        source: file that is compiled, with the headers beside it.

    Raises:
        CannotBuild: the CPU lacks AVX2, there is no compiler and nothing built before, or it failed.
    """
    wanted = choose_target(source, cpu_flags(), instruction_set)
    stem = f"{wanted.instruction_set}-{wanted.digest()}"
    try:
        compiler = find_compiler()
    except CannotBuild:
        folders = sorted(path.parent for path in (cache_dir / "cpu").glob(f"{stem}-*/{LIBRARY}"))
        found = next(filter(_is_sound, folders), None)
        if found is None:
            raise
        return found / LIBRARY
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
                    _compile(compiler, wanted, done / LIBRARY)
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
    return _compile(compiler, wanted, folder / LIBRARY)


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


def _compiler_digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    return hashlib.sha256(compiler.encode() + b"\n" + version.stdout).hexdigest()[:8]


def _compile(compiler: str, target: CompileTarget, library: Path) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    logger.info("building the fused CPU step source=%s compiler=%s folder=%s", target.source, compiler, library.parent)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = compile_objects(compiler, [target], Path(folder))[target]
        if isinstance(compiled, CannotBuild):
            raise compiled
        run_compiler([compiler, "-shared", "-pthread", *map(str, compiled), "-o", str(library)])
    logger.info("built the fused CPU step seconds=%.1f", time.monotonic() - begin)
    return library
