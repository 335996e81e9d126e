"""The keeper is left out where the kernel has not what it needs."""

import pytest

from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor import keeper_process
from funitel.launcher.supervisor.keeper_process import usable_keeper


@pytest.mark.parametrize("counts", [True, False])
def test_a_kernel_that_does_not_count_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, counts: bool
) -> None:
    monkeypatch.setattr(keeper_process, "counts_bytes", lambda: counts)
    assert usable_keeper(LauncherSettings(keeper=True)).keeper is counts
    assert ("does not count the bytes" in caplog.text) is not counts


def test_nothing_is_said_of_a_keeper_that_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_process, "counts_bytes", lambda: False)
    assert usable_keeper(LauncherSettings(keeper=False)) == LauncherSettings(keeper=False)
    assert caplog.text == ""
