"""`machine`: control planes over imitated shards."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from funitel_testing.lifecycles import Machine, machine_of


@pytest.fixture
async def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    """Control planes over imitated shards; nothing of them is left at the end."""
    async with machine_of(tmp_path, tmp_path_factory.mktemp("r")) as made:
        yield made
