"""The wheel as a user gets it: five portions, typed, without tests; its programs run with nothing of this tree."""

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORTIONS = ("proto", "router", "model_server", "launcher", "llm")
PROGRAMS = {
    "funitel": "launcher",
    "funitel-router": "router",
    "funitel-server": "model_server",
    "text-generation-launcher": "launcher",
    "text-generation-router": "router",
    "text-generation-server": "model_server",
}


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as `make wheel` does."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), ".")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    """Every file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def run(installed: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python on the installed wheel and this environment's libraries.

    Without `site` no .pth file is read, so that an editable install of this tree stays out.
    """
    path = ":".join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return subprocess.run(
        [sys.executable, "-S", *words], cwd=installed.parent, env={"PYTHONPATH": path}, capture_output=True, text=True
    )


def test_it_holds_the_five_portions_and_says_that_they_are_typed(names: list[str]) -> None:
    for portion in PORTIONS:
        assert {f"funitel/{portion}/__init__.py", f"funitel/{portion}/py.typed"} <= set(names)
    assert "funitel/__main__.py" in names
    assert "funitel/model_server/tools/quantize/calibration.txt" in names


def test_it_holds_every_source_file_and_no_test(names: list[str]) -> None:
    sources = {
        str(path.relative_to(ROOT / portion))
        for portion in PORTIONS
        for path in (ROOT / portion / "funitel").rglob("*")
        if path.suffix in (".py", ".pyi", ".proto", ".typed", ".cpp", ".h", ".txt")
    }
    packaged = {name for name in names if not re.match(r"funitel-[^/]+\.dist-info/", name)}
    assert packaged == sources
    assert not [name for name in packaged if "test" in name]
    assert "funitel/__init__.py" not in packaged


def test_it_installs_tgis_programs_beside_ours(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        lines = archive.read(name).decode().splitlines()
    found = dict(line.split(" = ") for line in lines if " = " in line)
    assert found == {program: f"funitel.{portion}.__main__:main" for program, portion in PROGRAMS.items()}


def test_nothing_of_this_tree_is_used(installed: Path) -> None:
    modules = ", ".join(f"funitel.{portion}" for portion in PORTIONS)
    files = ", ".join(f"funitel.{portion}.__file__" for portion in PORTIONS)
    result = run(installed, "-c", f"import json, {modules}; print(json.dumps([{files}]))")
    assert result.returncode == 0, result.stderr
    assert all(Path(file).is_relative_to(installed) for file in json.loads(result.stdout))


@pytest.mark.parametrize("module", ["funitel", "funitel.launcher"])
def test_the_launcher_tells_its_version(installed: Path, wheel: Path, module: str) -> None:
    (metadata,) = importlib.metadata.distributions(path=[str(installed)], name="funitel")
    result = run(installed, "-m", module, "--version")
    assert (result.returncode, result.stdout) == (0, f"funitel {metadata.version}\n"), result.stderr
    assert wheel.name.startswith(f"funitel-{metadata.version}-")


def test_the_router_prints_its_schema(installed: Path) -> None:
    result = run(installed, str(installed / "bin" / "funitel-router"), "print-schema")
    assert result.returncode == 0, result.stderr
    assert "/generate" in json.loads(result.stdout)["paths"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(installed: Path, program: str) -> None:
    result = run(installed, str(installed / "bin" / program), "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
