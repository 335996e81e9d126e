"""Choose and download the wheels that requirements need on another machine, without what is there already."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import BytesParser
from functools import cached_property
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from gpu_packing.errors import PackError

NEWEST_GLIBC = 34  # 2.34 of 2021
OLDEST_GLIBC = 5
OLDER_TAGS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")

Download = Callable[[Sequence[str]], Sequence[Path]]
"""Downloads a wheel for each requirement, without its dependencies."""


@dataclass(frozen=True)
class Target:
    """The machine that wheels are for: CPython of a version on Linux of x86-64."""

    python: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d{1,2}", self.python):
            raise PackError(f"--python takes a version such as 3.12, not {self.python!r}")

    @property
    def pip_flags(self) -> list[str]:
        """pip's flags for wheels of that machine."""
        glibc = range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)
        platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in glibc), *OLDER_TAGS]
        abis = [f"cp{self.python.replace('.', '')}", "abi3", "none"]
        flags = ["--only-binary=:all:", "--python-version", self.python, "--implementation", "cp"]
        flags += [flag for abi in abis for flag in ("--abi", abi)]
        return flags + [flag for platform in platforms for flag in ("--platform", platform)]

    @property
    def environment(self) -> dict[str, str]:
        """What markers of requirements are evaluated with."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "os_name": "posix",
        }


@dataclass
class Pip:
    """Downloads wheels for a target with pip; each call has a folder of its own below `folder`."""

    target: Target
    folder: Path
    calls: int = 0

    def __call__(self, requirements: Sequence[str]) -> list[Path]:
        folder = self.folder / str(self.calls)
        self.calls += 1
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *self.target.pip_flags]
        done = subprocess.run(
            [*command, "--dest", str(folder), *requirements], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing was said"]
            raise PackError(f"pip cannot download: {said[-1].removeprefix('ERROR: ')}")
        return sorted(folder.glob("*.whl"))


@dataclass(frozen=True)
class Wheel:
    """A downloaded wheel."""

    path: Path

    @cached_property
    def name(self) -> str:
        """The normalised name of its package."""
        return parse_wheel_filename(self.path.name)[0]

    @cached_property
    def version(self) -> Version:
        """The version of its package."""
        return parse_wheel_filename(self.path.name)[1]

    @cached_property
    def requirements(self) -> list[Requirement]:
        """All of its requirements, those of extras and of other platforms too."""
        with zipfile.ZipFile(self.path) as archive:
            names = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            metadata = BytesParser().parsebytes(archive.read(next(names)), headersonly=True)
        return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


@dataclass(frozen=True)
class Present:
    """Packages that are on the machine already; a version of None counts as fitting every requirement."""

    versions: Mapping[str, Version | None] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[str]) -> "Present":
        """From names, `name==version`, and files of such lines, as `pip freeze` writes them."""
        versions: dict[str, Version | None] = {}
        for line in _lines_of(entries):
            try:
                requirement = Requirement(line)
            except InvalidRequirement as error:
                raise PackError(f"--present: {line!r} is no file and no name of a package") from error
            exact = [each.version for each in requirement.specifier if each.operator in ("==", "===")]
            versions[canonicalize_name(requirement.name)] = Version(exact[0]) if exact else None
        return cls(versions)

    def fits(self, requirement: Requirement) -> bool:
        """Whether the machine has the package in a version that is asked for."""
        name = canonicalize_name(requirement.name)
        if name not in self.versions:
            return False
        version = self.versions[name]
        return version is None or requirement.specifier.contains(version, prereleases=True)


def _lines_of(entries: Iterable[str]) -> Iterator[str]:
    for entry in entries:
        is_file = Path(entry).is_file()
        lines = Path(entry).read_text(encoding="utf-8").splitlines() if is_file else entry.split(",")
        for line in lines:
            bare = line.partition("#")[0].strip()
            if bare and not (is_file and bare.startswith("-")):  # options of pip
                yield bare


def read_pins(constraints: Path) -> dict[str, Version]:
    """The versions of a constraints file."""
    pins: dict[str, Version] = {}
    for line in _lines_of([str(constraints)]):
        requirement = Requirement(line)
        (exact,) = requirement.specifier
        pins[canonicalize_name(requirement.name)] = Version(exact.version)
    return pins


@dataclass
class Collection:
    """Collects wheels for requirements and for what these require, in turn.

    Args:
        target: the machine they are for.
        download: gets wheels.
        present: what the machine has.
        pins: the version of a package where the requirements allow it.
        left_out: whether a package, by its normalised name, is not carried at all.
        replaced: what is asked of a package, whatever its dependents ask.
        follows_extras: whether optional requirements are collected where a requirement names their extra.
    """

    target: Target
    download: Download
    present: Present
    pins: Mapping[str, Version] = field(default_factory=dict)
    left_out: Callable[[str], bool] = lambda name: False
    replaced: Mapping[str, SpecifierSet] = field(default_factory=dict)
    follows_extras: bool = True
    wheels: dict[str, Wheel] = field(default_factory=dict)
    _specifiers: dict[str, SpecifierSet] = field(default_factory=dict)
    _extras: dict[str, set[str]] = field(default_factory=dict)

    def collect(self, roots: Iterable[Requirement]) -> dict[str, Wheel]:
        """The wheels by name.

        Raises:
            PackError: a wheel cannot be had, or no version fits all requirements.
        """
        waiting = [root for root in roots if self._applies(root, set())]
        while waiting:
            changed = {name for requirement in waiting if (name := self._note(requirement))}
            missing = sorted(name for name in changed if not self._is_chosen(name))
            if missing:
                for path in self.download([f"{name}{self._wanted(name)}" for name in missing]):
                    wheel = Wheel(path)
                    self.wheels[wheel.name] = wheel
            for name in missing:
                if not self._is_chosen(name):
                    raise PackError(f"no wheel of {name}{self._specifiers[name]} for Python {self.target.python}")
            waiting = [each for name in sorted(changed) for each in self._requirements_of(name)]
        return dict(sorted(self.wheels.items()))

    def _note(self, requirement: Requirement) -> str | None:
        """Add to what is asked of a package; returns its name if that changed something."""
        name = canonicalize_name(requirement.name)
        if self.left_out(name) or self.present.fits(requirement):
            return None
        specifier = self.replaced.get(name, requirement.specifier & self._specifiers.get(name, SpecifierSet()))
        extras = self._extras.get(name, set()) | (requirement.extras if self.follows_extras else set())
        if name in self._specifiers and (specifier, extras) == (self._specifiers[name], self._extras[name]):
            return None
        self._specifiers[name], self._extras[name] = specifier, extras
        return name

    def _is_chosen(self, name: str) -> bool:
        wheel = self.wheels.get(name)
        return wheel is not None and self._specifiers[name].contains(wheel.version, prereleases=True)

    def _wanted(self, name: str) -> str:
        """The specifier to download by."""
        pin = self.pins.get(name)
        specifier = self._specifiers[name]
        return f"=={pin}" if pin is not None and specifier.contains(pin, prereleases=True) else str(specifier)

    def _requirements_of(self, name: str) -> list[Requirement]:
        return [each for each in self.wheels[name].requirements if self._applies(each, self._extras[name])]

    def _applies(self, requirement: Requirement, extras: set[str]) -> bool:
        """Whether its marker holds on the target, with one of the extras or none."""
        if requirement.marker is None:
            return True
        environment = self.target.environment
        return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))
