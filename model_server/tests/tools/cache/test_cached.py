"""X18: models on the disk are listed with their bytes, and deleted where no process uses them."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, scan_cache_dir

from funitel.model_server.settings import CachedSettings, RemoveCachedSettings
from funitel.model_server.settings.catalogue import CATALOGUE, IndexPackage
from funitel.model_server.tools.cache.command import list_cached, remove_cached
from funitel.model_server.tools.cache.listing import hub_cache, users_of
from funitel.proto.errors import SettingsError, StartupError

SMOL = "smollm2-135m-instruct"
HUB_BYTES, GGUF_BYTES = 5000, 3000


def _repository(hub: Path, owner: str, name: str) -> Path:
    """A repository as the hub's library lays it out."""
    folder = hub / f"models--{owner}--{name}"
    commit = "a" * 40
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    (folder / "blobs" / "0123").write_bytes(bytes(HUB_BYTES))
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/0123")
    return folder


class Disk:
    """A hub cache and a cache folder with one model of each kind."""

    def __init__(self, root: Path) -> None:
        self.cache, self.hub = root / "cache", root / "hub"
        self.repository = _repository(self.hub, "owner", "a--model")
        (self.hub / "datasets--owner--data").mkdir()
        package = next(source for source in CATALOGUE[SMOL] if isinstance(source, IndexPackage))
        base = f"{Path(package.member).stem}-{package.sha256[:16]}"
        self.smol = self.cache / f"{base}-v7"
        self.smol.mkdir(parents=True)
        (self.smol / "source.json").write_text(json.dumps({"gguf": str(self.cache / f"{base}.gguf")}))
        self.gguf = self.cache / f"{base}.gguf"
        self.gguf.write_bytes(bytes(GGUF_BYTES))
        os.link(self.gguf, self.smol / "model.gguf")
        self.converted = self.cache / f"mine-{'b' * 16}-v7"
        self.converted.mkdir()
        (self.converted / "config.json").write_text("{}")
        (self.converted / "source.json").write_text(json.dumps({"gguf": "/elsewhere/mine.gguf", "conversion": 7}))
        (self.cache / "cpu").mkdir()  # compiled steps
        (self.cache / f".x-{'c' * 16}.partial").mkdir()
        self.outside = root / "outside"
        self.outside.mkdir()
        (self.outside / "config.json").write_text("{}")

    def listed(self) -> dict[str, Any]:
        content = json.loads(list_cached(CachedSettings(cache_dir=str(self.cache), json=True)))
        return {each["model_name"]: each for each in content["list"]}

    def remove(self, name: str, *, check: bool = False) -> list[dict[str, Any]]:
        settings = RemoveCachedSettings(name=name, check=check, json=True, cache_dir=str(self.cache))
        found: list[dict[str, Any]] = json.loads(remove_cached(settings))["list"]
        return found


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(made.hub))
    return made


def test_x18_every_kind_of_model_is_listed_with_its_bytes(disk: Disk) -> None:
    listed = disk.listed()
    assert set(listed) == {"owner/a/model", SMOL, "/elsewhere/mine.gguf"}
    smol = listed[SMOL]
    assert (smol["path"], smol["paths"]) == (str(disk.smol), [str(disk.smol), str(disk.gguf)])
    assert smol["bytes"] == GGUF_BYTES + (disk.smol / "source.json").stat().st_size  # a hard link counts once
    assert listed["/elsewhere/mine.gguf"]["path"] == str(disk.converted)
    assert not any(each["in_use"] for each in listed.values())


def test_a_repository_is_as_large_as_the_library_of_the_hub_says(disk: Disk) -> None:
    (repository,) = (each for each in scan_cache_dir(disk.hub).repos if each.repo_type == "model")
    entry = disk.listed()[repository.repo_id]
    assert entry["bytes"] - len("a" * 40) == repository.size_on_disk
    assert entry["path"] == str(repository.repo_path)


def test_the_folder_of_the_hub_is_that_of_its_library() -> None:
    assert hub_cache() == Path(constants.HF_HUB_CACHE)
    assert hub_cache({"HF_HOME": "/h"}) == Path("/h/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_cache({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HUB_CACHE": "/b", "HF_HOME": "/h"}) == Path("/b")
    assert hub_cache({}) == Path("~/.cache/huggingface/hub").expanduser()


def test_x18_check_deletes_nothing_and_removal_deletes_all_of_one_model(disk: Disk) -> None:
    (would_go,) = disk.remove(SMOL, check=True)
    assert would_go["paths"] == [str(disk.smol), str(disk.gguf)]
    assert disk.smol.exists()
    assert disk.remove(SMOL) == [would_go]
    assert not disk.smol.exists()
    assert not disk.gguf.exists()
    assert SMOL not in disk.listed()
    disk.remove("owner/a/model")
    assert not disk.repository.exists()
    assert disk.converted.exists()
    assert disk.outside.exists()


@pytest.mark.parametrize("name", ["smol", "../outside", "/", "", ".", "cpu"])
def test_what_is_not_listed_is_not_deleted(disk: Disk, name: str) -> None:
    with pytest.raises(SettingsError, match="is cached") as refused:
        disk.remove(name)
    assert "\n" not in refused.value.message
    assert disk.outside.exists()
    assert len(disk.listed()) == 3


def test_a_link_to_a_folder_outside_is_removed_without_the_folder(disk: Disk) -> None:
    link = disk.cache / f"linked-{'d' * 16}-v7"
    link.symlink_to(disk.outside)
    disk.remove(link.name)
    assert not link.is_symlink()
    assert (disk.outside / "config.json").exists()


@pytest.mark.parametrize("how", ["told", "open", "mapped"])
def test_x18_a_model_in_use_is_not_deleted(disk: Disk, how: str) -> None:
    file = disk.smol / "model.gguf"
    code = {
        "told": "",
        "open": f"file = open({str(file)!r}); ",
        "mapped": f"import mmap; file = open({str(file)!r}); m = mmap.mmap(file.fileno(), 0, prot=1); file.close(); ",
    }[how]
    words = [f"--tokenizer-name={disk.smol}"] if how == "told" else []
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}print('here', flush=True); input()", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert disk.listed()[SMOL]["in_use"]
    with pytest.raises(StartupError, match=f"in use by process {process.pid}: it is not deleted"):
        disk.remove(SMOL)
    assert file.exists()
    assert disk.gguf.exists()
    disk.remove("/elsewhere/mine.gguf")  # another is none of its business
    process.communicate(b"\n")
    assert users_of([disk.smol]) == []
    disk.remove(SMOL)
    assert not disk.smol.exists()


def test_a_model_that_is_being_prepared_is_not_deleted(disk: Disk) -> None:
    lock = disk.cache / ".locks" / f"{disk.smol.name}.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match="being prepared by another process"):
            disk.remove(SMOL)
    assert disk.smol.exists()


def test_the_table_and_an_empty_disk(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = list_cached(CachedSettings(cache_dir=str(disk.cache)))
    assert f"{SMOL}  {disk.smol}" in table
    assert len(table.splitlines()) == 3
    text = remove_cached(RemoveCachedSettings(name=SMOL, check=True, cache_dir=str(disk.cache)))
    assert text.startswith(f"would delete {disk.smol} of {SMOL}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert list_cached(CachedSettings(cache_dir=str(tmp_path / "none"))) == "no model is cached"
    assert json.loads(list_cached(CachedSettings(cache_dir=str(tmp_path / "none"), json=True))) == {"list": []}


def test_a_spec_file_is_checked_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "funitel.model_server", "check-spec", str(path)]
    path.write_text('{"num_layers": "two"}')
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {path}: ")
