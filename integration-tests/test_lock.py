"""The files of constraints: pins alone, within the bounds of pyproject.toml, checked by `scripts/lock.py --check`."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FILES = ("constraints.txt", "constraints-lowest.txt")


@pytest.fixture
def lock() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_constraints_has_pins_and_names_no_index(name: str) -> None:
    comment, *lines = (ROOT / name).read_text().splitlines()
    assert comment.startswith("# ")
    for line in lines:
        requirement = Requirement(line)
        assert requirement.url is None
        assert [part.operator for part in requirement.specifier] == ["=="]


def test_the_files_fit_the_bounds(lock: Any) -> None:
    assert list(lock.faults()) == []


def test_every_lower_bound_of_what_serving_needs_is_installed_by_make_lowest(lock: Any) -> None:
    pinned = lock.pins(lock.LOWEST)
    for extra in ("", "server", "otlp"):
        for requirement in lock.requirements()[extra]:
            name = canonicalize_name(requirement.name)
            assert name == "torch" or pinned[name] == [lock.lowest_allowed(requirement)]


@pytest.mark.parametrize(
    ("bound", "faults"),
    [
        ("grpcio>=999", ["constraints.txt has grpcio", "constraints-lowest.txt has grpcio"]),
        ("grpcio>=1.60", ["constraints-lowest.txt has grpcio"]),
        (
            "no-such-package>=1",
            ["constraints.txt has no no-such-package", "constraints-lowest.txt has no-such-package"],
        ),
    ],
)
def test_a_bound_that_moved_is_told(lock: Any, bound: str, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "requirements", lambda: {"": [Requirement(bound)]})
    found = list(lock.faults())
    assert len(found) == len(faults)
    assert all(line.startswith(start) for line, start in zip(found, faults, strict=True))


def test_a_line_that_is_no_pin_is_refused(lock: Any, tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# comment\ngrpcio>=1\n")
    with pytest.raises(SystemExit, match=r"not NAME==VERSION: grpcio>=1"):
        lock.pins(path)
