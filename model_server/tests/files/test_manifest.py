"""Checksums of folders: what is read at a start, and that damage is found."""

import logging
import os
from pathlib import Path

import pytest

from funitel.model_server.files import manifest
from funitel.model_server.files.manifest import MANIFEST, VERIFIED, Damaged, has_manifest, verify, write_manifest

CHUNK, SMALL = 1000, 500


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small file and two large ones, of three and of ten chunks."""
    for name, value in (
        ("CHUNK_BYTES", CHUNK),
        ("SMALL_BYTES", SMALL),
        ("REREAD_BYTES", CHUNK),
        ("MOST_BYTES", 4 * CHUNK),
    ):
        monkeypatch.setattr(manifest, name, value)
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    (model / "small.json").write_bytes(b"{}" * 100)
    (model / "large").write_bytes(os.urandom(3 * CHUNK - 7))
    (model / "deep/larger").write_bytes(os.urandom(10 * CHUNK))
    write_manifest(model)
    return model


def chunks_read(folder: Path, monkeypatch: pytest.MonkeyPatch, *, rereads: bool = True) -> list[str]:
    read: list[str] = []
    digest = manifest._chunk_digest

    def noting(path: Path, number: int) -> str:
        read.append(f"{path.name} {number}")
        return digest(path, number)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_chunk_digest", noting)
        verify(folder, rereads=rereads)
    return read


def test_a6_what_nobody_touched_is_read_in_turns_and_small_files_always(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [chunks_read(folder, monkeypatch) for _ in range(13)]
    assert all(each[0] == "small.json 0" and len(each) == 2 for each in read)
    large = {each[1] for each in read}
    assert large == {*(f"large {i}" for i in range(3)), *(f"larger {i}" for i in range(10))}
    assert chunks_read(folder, monkeypatch, rereads=False) == ["small.json 0"]


def test_a6_what_was_touched_is_read_whole_within_a_budget_that_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "deep/larger"
    path.write_bytes(path.read_bytes())  # the same, in other bytes of the disk
    with caplog.at_level(logging.INFO):
        assert [name for name in chunks_read(folder, monkeypatch, rereads=False) if "larger" in name] == [
            f"larger {i}" for i in range(4)
        ]
    assert f"{6 * CHUNK} bytes were never verified here, and are at the next starts" in caplog.text
    assert chunks_read(folder, monkeypatch, rereads=False)[1:] == [f"larger {i}" for i in range(4, 8)]
    assert chunks_read(folder, monkeypatch, rereads=False)[1:] == ["larger 8", "larger 9"]
    assert chunks_read(folder, monkeypatch, rereads=False) == ["small.json 0"]


@pytest.mark.parametrize("name", ["small.json", "large", "deep/larger"])
@pytest.mark.parametrize("at", [0, 99, 199])
def test_a6_one_bit_is_found_though_size_and_time_stay(folder: Path, name: str, at: int) -> None:
    path = folder / name
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(Damaged, match=rf"{path} is damaged: of its bytes from 0 on, the checksum differs"):
        verify(folder)


def test_a6_what_is_missing_or_of_another_size_is_named(folder: Path) -> None:
    (folder / "large").write_bytes(b"")
    with pytest.raises(Damaged, match=r"large has 0 bytes, 2993 were written$"):
        verify(folder)
    (folder / "large").unlink()
    with pytest.raises(Damaged, match="large cannot be read: No such file"):
        verify(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", '{"chunk_bytes": 1000, "files": {}}', '{"chunk_bytes": 1000, "files": {"a": 1}}']
)
def test_a6_a_manifest_that_is_none_is_damage(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    assert has_manifest(folder)
    with pytest.raises(Damaged, match=f"{MANIFEST} is no manifest"):
        verify(folder)


def test_a6_a_folder_that_cannot_be_written_is_verified_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / VERIFIED).unlink()
    (folder / VERIFIED).mkdir()
    assert len(chunks_read(folder, monkeypatch)) == 5
    assert len(chunks_read(folder, monkeypatch)) == 5
