"""`plane`: the control plane's end in this process; it starts agents over imitated shards."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from funitel_testing.machines.plane import Plane


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    found = Plane(tmp_path)
    await found.start()
    yield found
    await found.close()
