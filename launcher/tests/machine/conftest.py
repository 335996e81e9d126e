"""`resolved`: settings of a replica as a control plane has them."""

from pathlib import Path

import pytest

from funitel.launcher.config.resolve import ResolvedSettings, resolve
from funitel.launcher.settings import LauncherSettings


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedSettings:
    return resolve(LauncherSettings(model_id=str(tmp_path), device="cpu"), 2, "/tmp/unused")
