"""The folders of adapters: where they may be, and what must be in them."""

import os
from pathlib import Path

import huggingface_hub
import pytest
from adapter_folders import write_adapter

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.proto.settings.adapter_list import AdapterList
from funitel.router.adapters.folder import NoSuchFolder, adapter_id, inspect, locate, locate_below


def test_a_folder_is_found_by_a_path_below_the_root_or_a_whole_one(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "root" / "mine")
    root = str(tmp_path / "root")
    assert locate_below(root, "mine") == locate_below(root, str(folder)) == folder


@pytest.mark.parametrize("path", ["../outside", "mine/../../outside", "link", "with_linked_weights"])
def test_what_is_outside_of_the_root_is_refused_wherever_the_path_leads_through(tmp_path: Path, path: str) -> None:
    outside, root = write_adapter(tmp_path / "outside"), tmp_path / "root"
    write_adapter(root / "mine")
    (root / "link").symlink_to(outside)
    linked = write_adapter(root / "with_linked_weights")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for each in (path, str(root / path)):
        with pytest.raises(InvalidRequest, match="`lora_path` must be below the folder of --lora-folder"):
            locate_below(str(root), each)


def test_without_a_root_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="with --lora-folder only, which is not given"):
        locate_below(None, str(write_adapter(tmp_path / "mine")))


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_path_that_is_none_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match="`lora_path` cannot be empty, or have a zero byte"):
        locate_below(str(tmp_path), path)


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 3000, "loop", "loop/a", "a\ud800b"])
def test_a_path_that_the_system_cannot_follow_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidRequest) as refused:
        locate_below(str(tmp_path), path)
    assert refused.value.param == "lora_path"
    assert refused.value.message.startswith("`lora_path` ")
    assert len(refused.value.message) < 250
    assert "\n" not in refused.value.message


def test_a_link_that_leads_nowhere_within_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").symlink_to("adapter_config.json")
    with pytest.raises(InvalidRequest, match="lora_path"):
        locate_below(str(tmp_path), "a")


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NoSuchFolder, match="`lora_path` must be a folder"):
        locate_below(str(tmp_path), "none")
    with pytest.raises(NoSuchFolder, match="`lora_path` must be a folder"):
        inspect("mine", tmp_path / "none")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (b"{", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"[" * 100_000, "must be a JSON object"),
        (b" " * 1_000_001 + b"{}", "must be a JSON object of at most 1000000 bytes"),
        (b"{}", "must have `peft_type` LORA. Given: None"),
        (b'{"peft_type": "IA3"}', "must have `peft_type` LORA. Given: 'IA3'"),
    ],
)
def test_a_config_that_is_of_no_lora_is_refused(tmp_path: Path, config: bytes, problem: str) -> None:
    folder = write_adapter(tmp_path / "mine")
    (folder / "adapter_config.json").write_bytes(config)
    with pytest.raises(InvalidRequest, match=problem):
        inspect("mine", folder)


def test_a_folder_without_the_files_of_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no adapter_config\.json: it is no adapter"):
        inspect("mine", tmp_path)
    folder = write_adapter(tmp_path / "mine")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match=r"has no adapter_model\.safetensors; adapter_model\.bin, a pickle, is"):
        inspect("mine", folder)


def test_of_a_repository_only_the_files_of_an_adapter_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetched(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        if revision == "gone":
            raise OSError("404: no such revision\nand more")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    [source] = AdapterList("mine=owner/one@v1")
    assert locate(source) == tmp_path
    assert asked == [("owner/one", "v1", ["adapter_config.json", "adapter_model.safetensors"])]
    [source] = AdapterList("owner/one@gone")
    with pytest.raises(
        StartupError, match="--lora-adapters owner/one=owner/one@gone .* had from the hub: 404: no such"
    ):
        locate(source)


def test_an_id_is_of_a_name_and_of_files_as_they_are(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "mine")
    found = inspect("mine", folder)
    assert (found.base, found.adapter.path) == ("base", str(folder))
    assert found.adapter.id == inspect("mine", folder).adapter.id == adapter_id("mine", folder)
    assert found.adapter.id != inspect("other", folder).adapter.id
    replaced = folder / "new"
    replaced.write_bytes(b"{}")
    os.replace(replaced, folder / "adapter_model.safetensors")
    assert inspect("mine", folder).adapter.id != found.adapter.id
