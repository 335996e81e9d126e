"""A name is a folder, or a repository of the hub; what is neither is explained."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fakes import byte_tokenizer
from huggingface_hub.errors import LocalEntryNotFoundError

from funitel.proto.errors import StartupError
from funitel.router.text.model_files import MAX_TEMPLATE_BYTES, ModelFiles, find_model_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_model_folder(str(tmp_path)) == tmp_path


def test_an_absolute_path_is_never_looked_up() -> None:
    assert find_model_folder("/nowhere/at/all") == Path("/nowhere/at/all")


def test_a_repository_is_fetched_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, **more: Any) -> str:
        asked.update(more, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert find_model_folder("org/model", "v2") == tmp_path
    assert (asked["repository"], asked["revision"]) == ("org/model", "v2")
    assert "tokenizer.json" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_a_repository_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repository: str, **more: Any) -> str:
        raise LocalEntryNotFoundError("not in the cache\nand so on")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(StartupError) as refused:
        find_model_folder("org/model", "v2")
    assert (
        refused.value.message
        == "--tokenizer-name org/model at revision v2 cannot be had from the hub: not in the cache"
    )


@pytest.mark.parametrize("name", ["nobody", "a/b/c"])
def test_what_is_neither_is_explained(name: str) -> None:
    with pytest.raises(StartupError, match=f"--tokenizer-name {name} is neither a folder nor a hub repository"):
        find_model_folder(name)


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--revision v2 is for hub repositories"):
        find_model_folder(str(tmp_path), "v2")


def test_a_template_file_beyond_all_bounds_is_refused_by_its_size(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(MAX_TEMPLATE_BYTES + 1)
    files = ModelFiles(tmp_path)
    with pytest.raises(StartupError, match=r"chat_template\.jinja has 4194305 bytes, at most 4194304 are read"):
        files.template_texts(files.tokenizer())
