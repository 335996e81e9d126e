"""The library of a wheel: every source of the C++ step for every instruction set, compiled when the wheel was built.

It is used for those sources and flags that it was compiled from: an edited source is compiled again. The standard
library and `compiler` are all that this module needs: the build of a wheel imports it too.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from funitel.model_server.cpu.compiler import (
    INSTRUCTION_SETS,
    SOURCES,
    STEP,
    CannotBuild,
    CompileTarget,
    compile_objects,
    find_compiler,
    run_compiler,
)

logger = logging.getLogger(__name__)

FOLDER = SOURCES.parent / "prebuilt"
LIBRARY, CONTENTS = "funitel_cpu.so", "contents.json"

_WIDEST = INSTRUCTION_SETS[0][0]
# Weakest instruction set first: of an inline function of the C++ library, which all targets may call, the linker keeps
# the first one that it meets.
TARGETS = (
    *(CompileTarget(source, name) for name, *_ in reversed(INSTRUCTION_SETS) for source in (STEP, "roofs.cpp")),
    CompileTarget("encoder.cpp", _WIDEST),  # every CPU with AMX has that set
)
_EXPORTED = "{ global: funitel_*_*; local: *; };"


def find_prebuilt(target: CompileTarget) -> Path | None:
    """The library of the wheel, if it has this target as it would be compiled now, and is as it was built."""
    library = FOLDER / LIBRARY
    try:
        contents = json.loads((FOLDER / CONTENTS).read_text())
        if contents["targets"].get(_key(target)) != target.digest():
            return None
        if contents["sha256"] == _sha256(library):
            return library
        logger.warning("%s is damaged: install the package again", library)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        logger.warning("%s cannot be used: %s", library, error)
    return None


def build_prebuilt(folder: Path) -> None:
    """Compile all targets, side by side, and link them into one library in `folder`, with a list of its contents.

    Raises:
        CannotBuild: there is no compiler, or it does not know the instructions of decoders. Those of `encoder.cpp` are
            left out with a warning if only they are unknown.
    """
    compiler = find_compiler()
    objects = dict(_built(compile_objects(compiler, TARGETS, folder)))
    paths = [path for each in objects.values() for path in each]
    exported = folder / "exported.map"
    exported.write_text(_EXPORTED)
    link = [compiler, "-shared", "-pthread", f"-Wl,--version-script={exported}"]
    run_compiler([*link, *map(str, paths), "-o", str(folder / LIBRARY)])
    for path in (exported, *paths):
        path.unlink()
    contents = {
        "sha256": _sha256(folder / LIBRARY),
        "targets": {_key(target): target.digest() for target in objects},
    }
    (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n")


def _built(
    compiled: Mapping[CompileTarget, list[Path] | CannotBuild],
) -> Iterator[tuple[CompileTarget, list[Path]]]:
    for target, result in compiled.items():
        if isinstance(result, list):
            yield target, result
        elif target.source == "encoder.cpp":
            logger.warning("encoders are left out of the prebuilt library: %s", result)
        else:
            raise result


def _key(target: CompileTarget) -> str:
    return f"{target.source} {target.instruction_set}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
