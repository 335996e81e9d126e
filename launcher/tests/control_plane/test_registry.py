"""X3: registrations persist with their files, or are kept in memory; a name is registered once."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from funitel.launcher.control_plane.records import Registration
from funitel.launcher.control_plane.registry import Registry
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.proto.errors import Conflict, NotFound, StorageFailed

FIRST = Registration(
    type="LLM", name="o/a b", model="/m", spec={"num_layers": 2}, chat_template="{{ messages }}", persist=True
)


def read_files(registry: Registry, of: Registration = FIRST) -> dict[str, object]:
    return {flag: json.loads(Path(path).read_text()) for flag, path in registry.files(of).items()}


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[StateThread]:
    thread = StateThread(StateStore(tmp_path / "fleet.db"))
    yield thread
    await thread.close()


async def test_x3_registrations_and_their_files_outlive_the_control_plane(state: StateThread, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    registry = Registry(state, folder)
    await registry.add(FIRST)
    await registry.add(Registration(type="embedding", name="e", model="/e", persist=False))
    written = read_files(registry)
    assert written == {"model_spec": {"num_layers": 2}, "tokenizer_config_path": {"chat_template": "{{ messages }}"}}
    shutil.rmtree(folder)
    again = Registry(state, folder)
    await again.open()
    assert again.all() == [FIRST]
    assert read_files(again) == written
    assert (again.find("o/a b"), again.find("e")) == (FIRST, None)
    assert again.of_type("embedding") == []


async def test_x3_a_registration_is_removed_with_its_files(state: StateThread, tmp_path: Path) -> None:
    registry = Registry(state, tmp_path / "files")
    await registry.add(FIRST)
    with pytest.raises(NotFound):
        await registry.remove("embedding", FIRST.name)
    await registry.remove("LLM", FIRST.name)
    assert list((tmp_path / "files").iterdir()) == []
    with pytest.raises(NotFound):
        await registry.remove("LLM", FIRST.name)
    again = Registry(state, tmp_path / "files")
    await again.open()
    assert again.all() == []


async def test_a_name_is_registered_once(state: StateThread, tmp_path: Path) -> None:
    registry = Registry(state, tmp_path / "files")
    await registry.add(FIRST)
    with pytest.raises(Conflict, match="is registered already, as LLM"):
        await registry.add(Registration(type="embedding", name=FIRST.name, model="/x"))
    assert registry.find(FIRST.name) == FIRST


async def test_what_cannot_be_written_is_not_registered(state: StateThread, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("in the way")
    registry = Registry(state, tmp_path / "files")
    with pytest.raises(StorageFailed):
        await registry.add(FIRST)
    assert registry.all() == []
    assert await state(StateStore.registrations) == []


async def test_a_long_name_has_files_of_its_own(state: StateThread, tmp_path: Path) -> None:
    registry = Registry(state, tmp_path / "files")
    for last in ("a", "b"):
        name = "\u6a21" * 199 + last
        await registry.add(Registration(type="LLM", name=name, model="/m", chat_template=last))
    contents = [read_files(registry, each) for each in registry.all()]
    assert [each["tokenizer_config_path"] for each in contents] == [{"chat_template": "a"}, {"chat_template": "b"}]
