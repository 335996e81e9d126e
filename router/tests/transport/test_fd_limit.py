"""How many connections the limit on open files leaves room for."""

import resource

import pytest

from funitel.proto.errors import SettingsError
from funitel.router.transport import fd_limit
from funitel.router.transport.fd_limit import OTHER_FILES, USUAL_CONNECTIONS, allow_open_files, max_connections


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limit of this process, made up: the last one is what holds."""
    held = [(1024, 4096)]
    monkeypatch.setattr(fd_limit.resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(fd_limit.resource, "setrlimit", lambda _, limit: held.append(limit))
    return held


def test_the_limit_is_raised_to_the_highest_that_may_be(limits: list[tuple[int, int]]) -> None:
    assert allow_open_files() == 4096
    assert limits[-1] == (4096, 4096)
    assert allow_open_files() == 4096
    assert len(limits) == 2, "it is there already"


def test_a_system_without_a_limit_and_one_that_refuses(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.append((256, resource.RLIM_INFINITY))
    assert allow_open_files() == fd_limit.MAX_FILES

    def refuse(*_: object) -> None:
        raise ValueError("not allowed")

    limits.append((256, resource.RLIM_INFINITY))
    monkeypatch.setattr(fd_limit.resource, "setrlimit", refuse)
    assert allow_open_files() == 256


def test_as_many_connections_as_the_files_leave_room_for(caplog: pytest.LogCaptureFixture) -> None:
    assert max_connections(None, 1 << 20) == USUAL_CONNECTIONS
    assert not caplog.records
    assert max_connections(None, 1024) == 1024 - OTHER_FILES
    assert caplog.messages == ["1024 files may be open (ulimit -Hn): at most 768 connections"]
    assert max_connections(None, 100) == 1
    assert max_connections(768, 1024) == 768
    with pytest.raises(SettingsError, match=r"--max-connections 769 needs 1025 open files, at most 1024 are allowed"):
        max_connections(769, 1024)
