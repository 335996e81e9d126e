"""Executors of one tiny model, with forced spans and without; its context is `CONTEXT` of the module."""

from pathlib import Path

import pytest

from funitel.model_server.executor.executor import Executor
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=request.module.CONTEXT)


@pytest.fixture(scope="module")
def forcing(folder: Path) -> Executor:
    return load_executor(folder)


@pytest.fixture(scope="module")
def stepping(folder: Path) -> Executor:
    """Computes every token by itself."""
    return load_executor(folder, disable_forced_spans=True)
