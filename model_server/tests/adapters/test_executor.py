"""Adapters through the executor: mixed batches, loading between steps."""

from pathlib import Path

import pytest
import torch

from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, merge, save_adapter


def test_thin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny("llama", tmp_path / "base")
    executor = load_executor(base)
    for i, made in enumerate(EIGHT):
        folder = save_adapter(base, tmp_path / f"adapter{i}", made, i)
        merged = merge(base, folder, made, tmp_path / f"merged{i}")
        loaded = executor.load_adapter(f"a{i}", str(folder))
        assert loaded.max_rank == max(made.rank, *made.rank_pattern.values(), 0)
        found = run_alone(executor, start(i, range(40, 60), adapter_id=f"a{i}"))
        expected = run_alone(load_executor(merged), start(i, range(40, 60)))
        assert ids_of(found) == ids_of(expected), made
