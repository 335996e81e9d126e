"""How many connections the limit on open files leaves room for."""

import resource

import pytest

from funitel.proto.errors import SettingsError
from funitel.router.transport import connection_limits as fd_limit
from funitel.router.transport.connection_limits import OTHER_FILES, USUAL_CONNECTIONS, allow_open_files, max_connections


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
    assert max_connections(768, 1024) == 768
    with pytest.raises(SettingsError, match=r"--max-connections 769 needs 1025 open files, at most 1024 are allowed"):
        max_connections(769, 1024)


@pytest.mark.parametrize(("num_files", "connections"), [(48, 12), (64, 16), (100, 25), (256, 64), (341, 86), (342, 86)])
def test_a11_few_files_are_divided_and_never_less_than_none(
    num_files: int, connections: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert max_connections(None, num_files) == connections
    assert caplog.messages == [f"{num_files} files may be open (ulimit -Hn): at most {connections} connections"]
    assert max_connections(connections, num_files) == connections
    needed, line = num_files + 1, f"at most {num_files} are allowed"
    with pytest.raises(SettingsError, match=rf"--max-connections {connections + 1} needs {needed} open files, {line}"):
        max_connections(connections + 1, num_files)


@pytest.mark.parametrize("wanted", [None, 1])
def test_a11_too_few_files_for_a_router_are_one_line(wanted: int | None) -> None:
    with pytest.raises(SettingsError, match=r"^47 files may be open \(ulimit -Hn\), a router needs at least 48$"):
        max_connections(wanted, 47)
