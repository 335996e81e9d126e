"""`benchmarks/gpu_pack.py`: which wheels are chosen, CUDA code of one architecture, pieces and their unpacking."""

import hashlib
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: scripts there have names that packages have too

contents = import_module("gpu_packing.contents")
fatbin = import_module("gpu_packing.fatbin")
pieces = import_module("gpu_packing.pieces")
wheels = import_module("gpu_packing.wheels")
gpu_pack = import_module("gpu_pack")
PackError = import_module("gpu_packing.errors").PackError

TARGET = wheels.Target("3.12")

# A library with CUDA code


def entry(kind: int, architecture: int, content: bytes) -> bytes:
    """An entry of a container, with a header of 64 bytes."""
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(content)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + content


def container(*entries: bytes) -> bytes:
    """A container as nvcc writes it, with its source file's code for each architecture."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """An ELF with one section beside that of names."""
    names = b"\0.shstrtab\0" + name + b"\0"
    section_at = 64 + len(names) + -len(names) % 8
    headers_at = section_at + len(section)
    header = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", headers_at)
    header = header.ljust(0x3C, b"\0") + struct.pack("<HH", 3, 1)
    headers = [(0, 0, 0, 0, 0, 0), (1, 3, 0, 0, 64, len(names)), (11, 1, 2, 0, section_at, len(section))]
    packed = b"".join(struct.pack("<IIQQQQIIQQ", *each, 0, 0, 0, 0) for each in headers)
    return header.ljust(64, b"\0") + names.ljust(section_at - 64, b"\0") + section + packed


OLD, NEW, ALONE = (entry(2, sm, bytes([sm]) * size) for sm, size in ((80, 400), (90, 240), (80, 160)))
TWO = container(OLD, NEW) + bytes(8) + container(ALONE)


def entries_of(content: bytes) -> list[list[bytes]]:
    return [[each.content for each in found.entries] for found in fatbin.containers(content)]


def test_a_thinned_library_keeps_the_code_of_one_architecture_in_its_place() -> None:
    """A container without such code gets the smallest code for another one, which cannot be launched."""
    whole = library(TWO)
    thinned = fatbin.thin(whole, 90)
    assert entries_of(whole) == [[OLD, NEW], [ALONE]]
    assert entries_of(thinned.content) == [[NEW], [ALONE]]
    assert (thinned.num_containers, thinned.num_without_code) == (2, 1)
    assert (thinned.kept_bytes, thinned.all_bytes) == (len(NEW) + len(ALONE), len(OLD) + len(NEW) + len(ALONE))
    assert len(thinned.content) == len(whole)
    first, second = fatbin.containers(thinned.content)
    assert second.begin == next(iter(fatbin.containers(whole))).end + 8
    assert not any(thinned.content[first.end : second.begin])
    section = whole.index(TWO)
    assert thinned.content[:section] == whole[:section]
    assert thinned.content[section + len(TWO) :] == whole[section + len(TWO) :]


def test_ptx_is_not_kept_as_code_of_its_architecture() -> None:
    ptx = entry(1, 90, bytes([1]) * 16)
    assert entries_of(fatbin.thin(library(container(ptx, NEW)), 90).content) == [[NEW]]


def test_ptx_stays_where_there_is_no_machine_code_to_put_in_its_place() -> None:
    ptx = container(entry(1, 80, bytes([1]) * 16))
    whole = library(container(NEW) + ptx)
    assert fatbin.thin(whole, 90).content == whole


def test_a_library_without_cuda_code_stays_as_it_is() -> None:
    whole = library(b"anything", b".text_only")
    assert fatbin.thin(whole, 90).content == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MZ", "no ELF of 64 bits"),
        (library(TWO + b"rubbish!" + bytes(8)), "something that is no container"),
        (library(container(entry(7, 90, bytes(8)))), "not of a known form"),
        (library(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40)), "is cut off"),
        (library(container(OLD)), "no machine code for sm_90"),
    ],
    ids=["no ELF", "rubbish", "unknown kind", "cut off", "another architecture"],
)
def test_a_library_of_another_form_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(PackError, match=message):
        fatbin.thin(content, 90)


# Wheels


@dataclass
class Wheelhouse:
    """A folder of tiny wheels instead of an index."""

    folder: Path
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, requires: Sequence[str] = (), files: dict[str, bytes] | None = None) -> None:
        """Write a wheel."""
        self.folder.mkdir(exist_ok=True)
        module = name.replace("-", "_")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
        with zipfile.ZipFile(self.folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{module}-{version}.dist-info/METADATA", metadata)
            archive.writestr(f"{module}-{version}.dist-info/RECORD", "")
            archive.writestr(f"{module}/__init__.py", f"VERSION = {version!r}\n")
            for path, content in (files or {}).items():
                archive.writestr(path, content)

    def __call__(self, requirements: Sequence[str]) -> list[Path]:
        """Give the newest wheel of each requirement, as pip does."""
        self.asked += requirements
        return [self._newest(Requirement(each)) for each in requirements]

    def _newest(self, requirement: Requirement) -> Path:
        found = [wheels.Wheel(path) for path in self.folder.glob(f"{requirement.name.replace('-', '_')}-*.whl")]
        fitting = [wheel for wheel in found if requirement.specifier.contains(wheel.version)]
        if not fitting:
            raise PackError(f"pip cannot download: no matching distribution found for {requirement}")
        newest: Path = max(fitting, key=lambda wheel: wheel.version).path
        return newest


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


def collected(house: Wheelhouse, *roots: str, present: Sequence[str] = (), **options: Any) -> dict[str, str]:
    collection = wheels.Collection(TARGET, house, wheels.Present.of(present), **options)
    return {name: str(wheel.version) for name, wheel in collection.collect(map(Requirement, roots)).items()}


def test_what_wheels_require_is_collected_for_the_target(house: Wheelhouse) -> None:
    house.add(
        "app",
        "1",
        ["lib>=1", "fast; extra == 'speed'", "winonly; sys_platform == 'win32'", "old; python_version < '3'"],
    )
    house.add("lib", "2", ["app"])
    house.add("fast", "1")
    assert collected(house, "app") == {"app": "1", "lib": "2"}
    assert collected(house, "app[speed]") == {"app": "1", "fast": "1", "lib": "2"}
    assert collected(house, "app[speed]", follows_extras=False) == {"app": "1", "lib": "2"}


def test_pins_hold_where_requirements_allow_them(house: Wheelhouse) -> None:
    for version in ("1", "2", "3"):
        house.add("lib", version)
    pins = {"lib": Version("2")}
    assert collected(house, "lib", pins=pins) == {"lib": "2"}
    assert collected(house, "lib<2", pins=pins) == {"lib": "1"}


def test_a_later_requirement_changes_the_choice(house: Wheelhouse) -> None:
    house.add("app", "1", ["lib<2"])
    house.add("lib", "1")
    house.add("lib", "2")
    assert collected(house, "lib", "app") == {"app": "1", "lib": "1"}
    house.add("other", "1", ["app", "lib>=2"])
    with pytest.raises(PackError, match="no matching distribution found for lib"):
        collected(house, "other")
    assert collected(house, "other", replaced={"lib": SpecifierSet(">=2")})["lib"] == "2"


def test_packages_that_are_there_are_not_collected(house: Wheelhouse, tmp_path: Path) -> None:
    house.add("app", "1", ["big-lib>=2"])
    house.add("big-lib", "2")
    present = tmp_path / "present.txt"
    present.write_text("# pip freeze\n-e /some/folder\nBig_Lib==2.1\nother @ file:///other.whl\n")
    assert collected(house, "app", present=[str(present)]) == {"app": "1"}
    assert collected(house, "app", present=["other,big.lib"]) == {"app": "1"}
    assert collected(house, "app", present=["big-lib==1.9"]) == {"app": "1", "big-lib": "2"}
    assert collected(house, "app", left_out=lambda name: name == "big-lib") == {"app": "1"}


def test_what_is_asked_of_pip_is_for_the_target() -> None:
    flags = TARGET.pip_flags
    assert flags[flags.index("--python-version") + 1] == "3.12"
    assert {"cp312", "abi3", "none", "manylinux_2_28_x86_64", "manylinux2014_x86_64"} <= set(flags)


def test_wheels_are_unpacked_as_installed_without_what_is_left_out(house: Wheelhouse, tmp_path: Path) -> None:
    files = {"tool-1.data/scripts/tool": b"#!", "tool-1.data/headers/tool.h": b"", "tool-1.data/purelib/more.py": b"1"}
    house.add("tool", "1", files=files | {"tool/_C_big.so": b"big"})
    contents.unpack_wheels([wheels.Wheel(path) for path in house(["tool"])], tmp_path / "site", ("tool/_C_*.so",))
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"bin/tool", "more.py", "tool/__init__.py", "tool-1.dist-info/METADATA"}
    assert (tmp_path / "site/bin/tool").stat().st_mode & 0o100


def test_a_file_outside_its_folder_is_refused(house: Wheelhouse, tmp_path: Path) -> None:
    house.add("tool", "1", files={"../escaped.py": b""})
    with pytest.raises(PackError, match="outside its folder"):
        contents.unpack_wheels([wheels.Wheel(path) for path in house(["tool"])], tmp_path / "site")


def test_one_of_two_attention_libraries_is_carried() -> None:
    assert contents.FLASH_ATTENTION_2 in contents.files_left_out_of_vllm(90)
    assert contents.FLASH_ATTENTION_3 in contents.files_left_out_of_vllm(80)


# Pieces


def unpack(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(folder / "unpack.sh"), str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A tar and a file in pieces of 64 KiB: two of the file, and one of each in the last transfer."""
    content = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(3000))  # incompressible
    site = tmp_path / "site"
    (site / "package").mkdir(parents=True)
    (site / "package/__init__.py").write_bytes(content[:5000])
    (tmp_path / "model.gguf").write_bytes(content)
    pieces.write_tar(site, tmp_path / "site.tar.xz")
    out = tmp_path / "out"
    out.mkdir()
    archives = pieces.split([tmp_path / "model.gguf", tmp_path / "site.tar.xz"], out, 1 << 16)
    pieces.write_manifest(out, archives, {"site": {"package": "1"}})
    return out


def test_pieces_and_their_unpacking_give_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    files = {path.name for path in packed.iterdir()}
    assert files == {"model.gguf.0", "model.gguf.1", "site.tar.xz.0", "unpack.sh", "MANIFEST.json"}
    assert max(path.stat().st_size for path in packed.iterdir()) == 1 << 16
    done = unpack(packed, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target/model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    module = "package/__init__.py"
    assert (tmp_path / "target/site" / module).read_bytes() == (tmp_path / "site" / module).read_bytes()
    assert "site: is there" in unpack(packed, tmp_path / "target").stdout


def test_a_manifest_has_sums_and_the_transfer_of_each_piece(packed: Path) -> None:
    manifest = json.loads((packed / "MANIFEST.json").read_text())
    model, site = manifest["archives"]
    assert [piece["call"] for piece in model["pieces"]] == [1, 2]
    assert [piece["call"] for piece in site["pieces"]] == [2]
    for archive in (model, site):
        read = [(packed / piece["file"]).read_bytes() for piece in archive["pieces"]]
        assert [hashlib.sha256(each).hexdigest() for each in read] == [each["sha256"] for each in archive["pieces"]]
        assert hashlib.sha256(b"".join(read)).hexdigest() == archive["sha256"]
        assert sum(map(len, read)) == archive["size"]
    assert manifest["packages"] == {"site": {"package": "1"}}


def test_what_is_not_complete_waits_for_its_transfer(packed: Path, tmp_path: Path) -> None:
    later = (packed / "model.gguf.1").rename(tmp_path / "model.gguf.1")
    done = unpack(packed, tmp_path / "target")
    assert done.returncode == 0
    assert "model.gguf: waits for model.gguf.1 (call 2)" in done.stdout
    assert not (tmp_path / "target/model.gguf").exists()
    later.rename(packed / "model.gguf.1")
    assert "model.gguf: unpacked" in unpack(packed, tmp_path / "target").stdout


def test_a_damaged_piece_is_refused(packed: Path, tmp_path: Path) -> None:
    piece = packed / "site.tar.xz.0"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    done = unpack(packed, tmp_path / "target")
    assert done.returncode == 1
    assert done.stderr == "error: site.tar.xz.0 is damaged: its sha256 is not that of MANIFEST.json\n"


def test_the_same_files_give_the_same_tar(tmp_path: Path) -> None:
    sums = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
        pieces.write_tar(tmp_path / name, tmp_path / f"{name}.tar.xz")
        sums.append((tmp_path / f"{name}.tar.xz").read_bytes())
    assert sums[0] == sums[1]


# The program


def pack(house: Wheelhouse, *arguments: str) -> int:
    make: Callable[[Any, Path], Wheelhouse] = lambda target, folder: house  # noqa: E731
    code: int = gpu_pack.main(arguments, make)
    return code


def test_a_pack_of_all_parts(house: Wheelhouse, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's library is thinned, what is there or of no use is left out, and funitel's pins hold."""
    pins = wheels.read_pins(gpu_pack.ROOT / "constraints.txt")
    needed = contents.site_requirements(gpu_pack.ROOT / "pyproject.toml")
    names = {wheels.canonicalize_name(each.name) for each in needed if not contents.is_with_torch(each.name)}
    for name in names:
        house.add(name, str(pins.get(name, "99")))
    house.add("starlette", "999")
    kernels = {"vllm/_C_stable.abi3.so": library(TWO), "vllm/_moe_C_stable.abi3.so": b"", "vllm/vllm-rs": b""}
    house.add("vllm", "0.26.0", ["torch==2.11", "tilelang", "fastapi[standard]"], kernels)
    house.add("fastapi", "1", ["uvicorn; extra == 'standard'"])
    demo = tmp_path / "demo.gguf"
    demo.write_bytes(b"GGUF")
    out = tmp_path / "out"
    code = pack(house, str(out), "--vllm", "0.26.0", "--demo", str(demo), "--present", "numpy", "pillow")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "vllm/_C_stable.abi3.so: 0.0 of 0.0 MB of CUDA code, 1 of 2 containers without sm_90" in printed.out
    assert "vllm.tar.xz.0" in printed.out
    packages = json.loads((out / "MANIFEST.json").read_text())["packages"]
    assert packages["site"]["starlette"] == str(pins["starlette"])
    assert set(packages["site"]) == names - {"numpy", "pillow"}
    assert packages["vllm"] == {"fastapi": "1", "vllm": "0.26.0"}
    unpack(out, tmp_path / "target")
    libraries = list((tmp_path / "target/vllm/vllm").glob("*.so"))
    assert [path.read_bytes() for path in libraries] == [fatbin.thin(library(TWO), 90).content]
    assert (tmp_path / "target/demo.gguf").read_bytes() == b"GGUF"
    assert not list(tmp_path.glob("gpu-pack-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--piece-mib", "0"], "--piece-mib takes a number of at least 1, not 0"),
        (["--python", "3.12.1"], "--python takes a version such as 3.12, not '3.12.1'"),
        (["--arch", "9"], "--arch takes an architecture such as 90, not 9"),
        (["--vllm", "newest"], "--vllm takes a version such as 0.26.0, not 'newest'"),
        (["--present", "no/such.txt"], "--present: 'no/such.txt' is no file and no name of a package"),
        (["--no-site"], "there is nothing to pack: --no-site needs --vllm or --demo"),
        (["--no-site", "--demo", "./none.gguf"], "no such folder or file: ./none.gguf"),
        (["--no-site", "--vllm", "0.1"], "pip cannot download: no matching distribution found for vllm==0.1"),
    ],
)
def test_bad_input_is_one_line(
    house: Wheelhouse, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert pack(house, str(tmp_path / "out"), *arguments) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_folder_with_files_is_refused(house: Wheelhouse, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert pack(house, str(tmp_path)) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} is not an empty folder\n"
