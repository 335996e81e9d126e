"""The built wheel: its files, its tag, its instruction sets, and a server from it where there is no compiler."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from funitel.model_server.cpu import compiler, prebuilt
from funitel.model_server.cpu.build import cpu_flags, open_library
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.encoder import amx
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.tools.kernel_bench.roofs import Roofs
from funitel_testing.clients import client_of, generate
from funitel_testing.forward_worker import CPU, fused_decoder, step_through
from funitel_testing.servers import serving

ROOT = Path(__file__).parent.parent
PACKAGES = [f"{part}/funitel" for part in ("proto", "router", "model_server", "launcher", "llm")]
STEP_FOLDER = "funitel/model_server/cpu"
COMPILED = {f"{STEP_FOLDER}/prebuilt/{name}" for name in (prebuilt.LIBRARY, prebuilt.CONTENTS)}

# Registers that AVX2 does not have, and instructions that AVX-512 does not have.
WIDE = re.compile(r"%(zmm|k[0-7]\b|[xy]mm(1[6-9]|2\d|3[01]))")
PAIRED, TILED = re.compile(r"\bvpdp(busd|wssd)s?\b"), re.compile(r"%tmm|\b(ld)?tile(loadd|config|release|zero)")

pytestmark = pytest.mark.skipif("avx2" not in cpu_flags(), reason="needs AVX2")


def _build(*arguments: str, target: Path, environ: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environ or {})}, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, is_full: bool) -> Path:
    """What `python -m build` makes: an sdist, and a wheel from that.

    All sources are compiled for all instruction sets, which takes minutes: in the short form without optimization. That
    changes no result, and the image of the container has a wheel with it.
    """
    folder, environ = tmp_path_factory.mktemp("dist"), {}
    if not is_full:
        fast = tmp_path_factory.mktemp("bin") / compiler.COMPILERS[0]
        fast.write_text(f'#!/bin/sh\nexec {compiler.find_compiler()} "$@" -O0\n')
        fast.chmod(0o755)
        environ["PATH"] = f"{fast.parent}:{os.environ['PATH']}"
    _build(str(ROOT), target=folder, environ=environ)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return _only(dist, "*.whl")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel, and with what it depends on from this one's."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    place = {"base": str(folder), "platbase": str(folder)}
    shared = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (Path(sysconfig.get_path("purelib", vars=place)) / "shared.pth").write_text("\n".join(shared) + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-compile", str(wheel)], check=True)
    return folder


def _without_compiler(environment: Path) -> dict[str, str]:
    """Variables of a machine on which nothing but the environment's own programs can be found."""
    return {"PATH": str(environment / "bin"), "PYTHONPATH": "", "CXX": "", "CC": ""}


# Files -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the files that git tracks")
def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    new = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", *PACKAGES], cwd=ROOT, capture_output=True, text=True
    )
    files = {path.partition("/")[2] for path in (tracked.stdout + new.stdout).splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == files | COMPILED
    assert f"{STEP_FOLDER}/csrc/engine.cpp" in found
    assert wheel.stat().st_size < 4 << 20


def test_the_sdist_has_what_a_build_needs_and_no_tests(dist: Path) -> None:
    with tarfile.open(_only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        f"model_server/{STEP_FOLDER}/csrc/entry.h",
    } < names
    assert not [name for name in names if "/tests/" in name or name.endswith(".so")]


def test_metadata_names_the_version_the_extras_and_the_commands(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        folder = f"funitel-{project['version']}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        commands = archive.read(f"{folder}/entry_points.txt").decode()
    header, _, readme = metadata.partition("\n\n")
    assert f"\nVersion: {project['version']}\n" in header
    assert "\nDescription-Content-Type: text/markdown" in header
    assert readme.strip() == (ROOT / "README.md").read_text().strip()
    assert set(re.findall(r"^Provides-Extra: (.*)$", header, re.MULTILINE)) == set(project["optional-dependencies"])
    for command, function in project["scripts"].items():
        assert f"\n{command} = {function}\n" in commands


# What is compiled --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def step(environment: Path) -> Path:
    """The folder of the compiled step in the environment."""
    return _only(environment / "lib", f"python*/site-packages/{STEP_FOLDER}/prebuilt")


def test_the_tag_is_what_the_symbols_permit(wheel: Path, step: Path, is_full: bool) -> None:
    """The compiler's symbols are those of glibc 2.28, which wheels of torch need, whatever glibc it was built with."""
    if is_full:  # unoptimized, one symbol more is called; the image has a wheel with this tag
        assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    headers = subprocess.run(["objdump", "-p", step / prebuilt.LIBRARY], capture_output=True, text=True, check=True)
    versions = re.findall(r" GLIBC_(\d+)\.(\d+)", headers.stdout)
    assert versions
    assert all((int(major), int(minor)) <= (2, 28) for major, minor in versions)
    assert set(re.findall(r"NEEDED +(\S+)", headers.stdout)) <= {
        *("libc.so.6", "libm.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")
    }


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        (["GLIBC_2.14"], "manylinux_2_28_x86_64"),
        (["GLIBC_2.2.5", "GLIBC_2.28", "CXXABI_1.3.11", "GCC_3.0"], "manylinux_2_28_x86_64"),
        (["GLIBC_2.2.5", "GLIBC_2.34"], "manylinux_2_34_x86_64"),
        (["GLIBC_2.14", "GLIBCXX_3.4.29"], "linux_x86_64"),
        (["GLIBC_2.14", "CXXABI_1.3.13"], "linux_x86_64"),
        ([], "linux_x86_64"),  # another C library
        (None, "linux_x86_64"),  # no objdump
    ],
)
def test_newer_symbols_make_a_narrower_tag(
    versions: list[str] | None, tag: str, hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if versions is not None:
        lines = "".join(f"    0x069691b4 0x00 09 {version}\\n" for version in versions)
        program = tmp_path / "objdump"
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        program.chmod(0o755)
    monkeypatch.setenv(
        "PATH", f"{tmp_path}:/no/such/folder" if versions is None else f"{tmp_path}:{os.environ['PATH']}"
    )
    assert hook.platform_of(tmp_path / "library.so") == tag


def test_no_function_has_instructions_of_a_wider_set(step: Path) -> None:
    """A function that the linker took from another instruction set would end the process on a CPU that lacks it."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(step / prebuilt.LIBRARY)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    name, wide, paired, tiled = "", set(), set(), set()
    for line in lines:
        if line.endswith(">:"):
            name = line.partition("<")[2]
        for pattern, found in ((WIDE, wide), (PAIRED, paired), (TILED, tiled)):
            if pattern.search(line):
                found.add(name)
    assert len(wide) > 100
    assert {name for name in wide if "avx512" not in name} == set()
    assert paired
    assert {name for name in paired if "avx512_vnni" not in name} == set()
    assert tiled
    assert {name for name in tiled if "avx512_vnni" not in name} == set()
    assert any("engine" in name for name in tiled)


@pytest.mark.parametrize("tier", [Tier.FLOAT32, Tier.INT8], ids=lambda tier: tier.label)
@pytest.mark.parametrize("name", [name for name, *_ in INSTRUCTION_SETS])
def test_prebuilt_and_compiled_give_the_same_bits(
    name: str, tier: Tier, step: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not next(needs for other, needs, _ in INSTRUCTION_SETS if other == name) <= cpu_flags():
        pytest.skip(f"the CPU lacks {name}")

    def logits() -> list[torch.Tensor]:
        decoder = fused_decoder(tiny_model, tier, TensorParallel(), instruction_set=name)
        spec = spec_of(read_json(tiny_model / "config.json"))
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        cache = KVCache(spec, heads, 50, decoder.block_size, decoder.kv_dtype, CPU)
        return step_through(decoder, cache, [[5, 6, 7, 8, 9] * 5, [9, 3, 1]], 8)

    compiled = logits()
    with monkeypatch.context() as patch:
        patch.setattr(prebuilt, "FOLDER", step)
        patch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
        patch.setenv("FUNITEL_CACHE", "/no/such/folder")
        found = logits()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, compiled, strict=True))


def test_kernels_are_measured_without_a_compiler(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", step)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    roofs = Roofs(tmp_path, num_threads=1, num_bytes=1 << 20)
    roofs.measure(MatrixKind.INT8, passes=1)
    assert roofs.multiply_s > 0


def test_encoders_have_their_functions_in_it(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are declared, and not called: few machines have AMX."""
    if "avx512_vnni" not in cpu_flags():
        pytest.skip("the CPU lacks avx512-vnni, which every CPU with AMX has")
    monkeypatch.setattr(prebuilt, "FOLDER", step)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    assert open_library(tmp_path, amx._FUNCTIONS, source="encoder.cpp").funitel_encoder_run


# Installed ---------------------------------------------------------------------------------------------------


def test_every_command_runs_from_the_installed_wheel(environment: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environ = {**os.environ, **_without_compiler(environment)}

    def said(command: str, flag: str) -> str:
        path = environment / "bin" / command
        done = subprocess.run([path, flag], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert project["version"] in said("funitel", "--version")
    assert all("--port" in said(command, "--help") for command in project["scripts"] if "server" not in command)
    assert all("serve" in said(command, "--help") for command in project["scripts"] if "server" in command)


async def test_a_server_without_a_compiler_runs_the_fused_step(
    environment: Path, tiny_model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    environ = {**_without_compiler(environment), "FUNITEL_CACHE": str(cache)}
    assert shutil.which("g++", path=environ["PATH"]) is None
    python = str(environment / "bin" / "python")
    with serving(tmp_path, "--model-id", str(tiny_model), environ=environ, python=python) as server:
        async with client_of(server.url) as client:
            assert len((await generate(client, "The sea", max_new_tokens=8)).ids) == 8
        log = server.tail(10**6)
    assert "prebuilt CPU step source=engine.cpp" in log
    assert "step=fused precision=int8" in log
    assert "runs in torch" not in log
    assert "building the fused CPU step" not in log
    assert not (cache / "cpu").exists()


# Without a compiler at the build ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pure(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A wheel from the sdist, built where there is no compiler, and what the build printed."""
    folder = tmp_path_factory.mktemp("pure")
    with tarfile.open(_only(dist, "*.tar.gz")) as archive:
        archive.extractall(folder / "source", filter="data")
    source = _only(folder / "source", "funitel-*")
    said = _build("--wheel", str(source), target=folder / "dist", environ={"PATH": str(Path(sys.executable).parent)})
    return _only(folder / "dist", "*.whl"), said


def test_a_build_without_a_compiler_makes_a_pure_wheel_and_says_so(pure: tuple[Path, str]) -> None:
    wheel, said = pure
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (
        "the wheel has no compiled C++ step, a shard compiles it at its first start: there is no C++ compiler" in said
    )
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"{STEP_FOLDER}/csrc/engine.cpp" in names
    assert not names & COMPILED
