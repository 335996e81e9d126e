"""Compile the C++ step into the wheel. Without a compiler, or elsewhere than on Linux on x86-64, the wheel is pure.

`HATCH_BUILD_NO_HOOKS=true` leaves it out too. Where a wheel has no compiled step, a shard compiles it at its first
start.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Of every system with glibc 2.28 or newer, as wheels of torch need it: the newest versions of symbols of the libraries
# of its compiler, GCC 8. Source: auditwheel's policy manylinux_2_28.
OLDEST_GLIBC = (2, 28)
NEWEST = {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


class CompiledStep(BuildHookInterface):  # type: ignore[type-arg]
    """Hook of hatchling; see `tool.hatch` in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library, and the tag of the platforms that it runs on."""
        if version == "editable":
            return
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            self._say_pure(f"{sys.platform} on {platform.machine()} is not Linux on x86-64")
            return
        sys.path.insert(0, str(Path(self.root) / "model_server"))
        from funitel.model_server.cpu.compiler import CannotBuild
        from funitel.model_server.cpu.prebuilt import CONTENTS, FOLDER, LIBRARY, build_prebuilt

        self._folder = TemporaryDirectory(prefix="funitel-wheel-")
        folder = Path(self._folder.name)
        self.app.display_info("compiling the C++ step for every instruction set, some minutes of one core")
        try:
            build_prebuilt(folder)
        except CannotBuild as error:
            self._say_pure(str(error))
            return
        place = FOLDER.relative_to(Path(self.root) / "model_server")
        for name in (LIBRARY, CONTENTS):
            build_data["force_include"][str(folder / name)] = str(place / name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(folder / LIBRARY)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _say_pure(self, reason: str) -> None:
        self.app.display_warning(
            f"the wheel has no compiled C++ step, a shard compiles it at its first start: {reason}"
        )


def platform_of(library: Path) -> str:
    """The platform tag for what a library asks of its system: manylinux where the versions of all symbols permit it."""
    try:
        headers = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "linux_x86_64"
    found = re.findall(r" (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)$", headers, re.MULTILINE)
    versions = [(name, tuple(map(int, number.split(".")))) for name, number in found]
    glibc = [version for name, version in versions if name == "GLIBC"]
    if not glibc or any(version > NEWEST[name] for name, version in versions if name in NEWEST):
        return "linux_x86_64"
    major, minor, *_ = max(OLDEST_GLIBC, *glibc)
    return f"manylinux_{major}_{minor}_x86_64"
