"""Whether nodes can be made, and the model that runs on them."""

from pathlib import Path

import pytest

from funitel_testing.faults.model import save_endless
from funitel_testing.machines.nodes import no_nodes


@pytest.fixture(autouse=True)
def _nodes() -> None:
    if reason := no_nodes():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers are as long as they are asked to be."""
    return save_endless(tmp_path_factory.mktemp("endless"))
