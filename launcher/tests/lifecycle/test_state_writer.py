"""What is written of models when the database cannot be written for a time."""

import asyncio

import pytest

from funitel.launcher.control_plane.records import ModelEntry, ModelState
from funitel.launcher.control_plane.store import StateStore, StateThread, StoredModel
from funitel.launcher.lifecycle.reports import state_writer
from funitel.launcher.lifecycle.reports.state_writer import StateWriter
from funitel.proto.errors import StorageFailed
from funitel_testing.lifecycles import eventually


async def test_what_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_writer, "RETRY_SECONDS", 0.1)
    state = StateThread(StateStore(None))
    writer = StateWriter(state)
    entry = ModelEntry(name="tiny", model_id="tiny", state=ModelState.READY, created=1.0)
    writer.save("tiny", lambda: StoredModel(entry=entry, request=None, is_wanted=True))
    await writer.flushed()
    attempts = []

    def full(*_: object) -> None:
        attempts.append(1)
        raise StorageFailed("the disk is full")

    with monkeypatch.context() as disk:
        disk.setattr(StateStore, "forget_model", full)
        writer.forget("tiny")
        await asyncio.wait_for(writer.flushed(), 5)
        await eventually(lambda: len(attempts) > 2, "further attempts")
    assert len(await state(StateStore.models)) == 1
    await writer.close()
    assert await state(StateStore.models) == []
    await state.close()
