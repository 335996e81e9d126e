"""The library of a wheel: used for the sources that it was compiled from, as it was built, and for nothing else."""

import ctypes
import json
import logging
import shutil
from pathlib import Path

import pytest

from funitel.model_server.cpu import compiler, prebuilt
from funitel.model_server.cpu.build import cpu_flags, open_library
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS, CannotBuild
from funitel.model_server.cpu.prebuilt import CONTENTS, LIBRARY, TARGETS, build_prebuilt

pytestmark = pytest.mark.skipif("avx2" not in cpu_flags(), reason="needs AVX2")

FUNCTIONS = {"funitel_answer": (ctypes.c_int, [])}
WIDTHS = {"avx2": 1, "avx512": 2, "avx512-vnni": 3}
SOURCE = """
#include "entry.h"
namespace funitel {
#if defined(__AVX512VNNI__)
inline int width() { return 3; }
#elif defined(__AVX512F__)
inline int width() { return 2; }
#else
inline int width() { return 1; }
#endif
int (*volatile chosen)() = &width;  // a call that the linker decides, not the compiler
}
extern "C" int ENTRY(funitel_answer)() { return funitel::chosen() + BONUS; }
"""
OTHER = '#include "entry.h"\nextern "C" int ENTRY(funitel_other)() { return 7; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something quick to compile in place of the C++ step."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    shutil.copy(compiler.SOURCES / "entry.h", folder)
    (folder / "engine.cpp").write_text(SOURCE.replace("BONUS", "0"))
    (folder / "roofs.cpp").write_text(OTHER)
    (folder / "encoder.cpp").write_text(OTHER.replace("other", "third"))
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


@pytest.fixture
def wheel(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a prebuilt library where an installed package has it."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    build_prebuilt(folder)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    return folder


@pytest.fixture
def no_compiler(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the compiler once the wheel is built."""
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))


def answer(tmp_path: Path, instruction_set: str | None = None) -> int:
    return int(open_library(tmp_path / "cache", FUNCTIONS, instruction_set).funitel_answer())


def is_compiled(tmp_path: Path) -> bool:
    return (tmp_path / "cache" / "cpu").exists()


def test_one_library_has_every_source_for_every_instruction_set(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {LIBRARY, CONTENTS}
    wanted = {f"{source} {name}" for name, *_ in INSTRUCTION_SETS for source in ("engine.cpp", "roofs.cpp")}
    assert set(json.loads((wheel / CONTENTS).read_text())["targets"]) == wanted | {"encoder.cpp avx512-vnni"}


def test_two_builds_are_equal_to_the_byte(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "another folder").mkdir()
    build_prebuilt(tmp_path / "another folder")
    for name in (LIBRARY, CONTENTS):
        assert (tmp_path / "another folder" / name).read_bytes() == (wheel / name).read_bytes()


@pytest.mark.usefixtures("no_compiler")
def test_each_instruction_set_of_this_cpu_is_chosen_from_it_without_a_compiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    able = [name for name, needs, _ in INSTRUCTION_SETS if needs <= cpu_flags()]
    assert [answer(tmp_path, name) for name in able] == [WIDTHS[name] for name in able]
    assert answer(tmp_path) == WIDTHS[able[0]]
    assert f"prebuilt CPU step source=engine.cpp instruction_set={able[0]}" in caplog.messages
    assert not is_compiled(tmp_path)
    with pytest.raises(CannotBuild, match="the CPU lacks avx1024"):
        answer(tmp_path, "avx1024")


@pytest.mark.parametrize("name", ["engine.cpp", "entry.h", "new.h"])
def test_an_edited_source_is_compiled_instead(
    name: str, wheel: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (sources / name).open("a") as file:
        file.write("// edited\n")
    (sources / "engine.cpp").write_text((sources / "engine.cpp").read_text().replace("+ 0", "+ 40"))
    assert answer(tmp_path, "avx2") == 41
    assert is_compiled(tmp_path)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(CannotBuild, match=r"there is no C\+\+ compiler"):
        open_library(tmp_path / "another cache", FUNCTIONS)


def test_other_flags_are_compiled_instead(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O1"))
    assert answer(tmp_path, "avx2") == 1
    assert is_compiled(tmp_path)


@pytest.mark.parametrize("kind", ["empty", "cut", "one bit"])
def test_a_damaged_library_is_never_opened(
    kind: str, wheel: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (wheel / LIBRARY).read_bytes()
    middle = len(content) // 2
    damaged = {
        "empty": b"",
        "cut": content[: len(content) // 3],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }[kind]
    (wheel / LIBRARY).unlink()
    (wheel / LIBRARY).write_bytes(damaged)
    assert answer(tmp_path, "avx2") == 1
    assert is_compiled(tmp_path)
    assert f"{wheel / LIBRARY} is damaged: install the package again" in caplog.messages


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"targets": 3}', '{"targets": {"engine.cpp avx2": "0"}}'])
def test_contents_that_make_no_sense_are_compiled_instead(text: str, wheel: Path, tmp_path: Path) -> None:
    (wheel / CONTENTS).write_text(text)
    assert answer(tmp_path, "avx2") == 1
    assert is_compiled(tmp_path)


@pytest.mark.parametrize("name", [LIBRARY, CONTENTS])
def test_a_file_that_is_gone_is_compiled_instead(name: str, wheel: Path, tmp_path: Path) -> None:
    (wheel / name).unlink()
    assert answer(tmp_path, "avx2") == 1
    assert is_compiled(tmp_path)


def test_a_library_that_this_system_cannot_load_is_compiled_instead(
    wheel: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one for another C library."""
    contents = json.loads((wheel / CONTENTS).read_text())
    (wheel / LIBRARY).write_bytes(b"\x7fELF of another system")
    contents["sha256"] = prebuilt._sha256(wheel / LIBRARY)
    (wheel / CONTENTS).write_text(json.dumps(contents))
    assert answer(tmp_path, "avx2") == 1
    assert "the prebuilt CPU step cannot be loaded: " in caplog.text


def test_a_compiler_without_amx_leaves_out_encoders_alone(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "encoder.cpp").write_text("#error no tiles\n")
    build_prebuilt(tmp_path)
    assert len(json.loads((tmp_path / CONTENTS).read_text())["targets"]) == len(TARGETS) - 1
    assert "encoders are left out of the prebuilt library: " in caplog.text
    (sources / "roofs.cpp").write_text("#error no vectors\n")
    with pytest.raises(CannotBuild, match=r"roofs\.cpp:1.*no vectors"):
        build_prebuilt(tmp_path)
