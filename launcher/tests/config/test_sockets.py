"""Socket paths under a lock, and ports."""

import os
import socket
import threading
from pathlib import Path

import pytest

from funitel.launcher.config import sockets
from funitel.launcher.config.port_owner import owner_of
from funitel.launcher.config.sockets import check_port, claim, free_port
from funitel.proto.errors import SettingsError
from funitel.proto.process import locks


@pytest.fixture
def default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "usual")
    monkeypatch.setattr(sockets, "DEFAULT_PATH", path)
    return path


def test_the_usual_path_is_taken_first_then_one_of_our_own(default_path: str) -> None:
    with claim(None, 1) as first, claim(None, 1) as second:
        assert first == default_path
        assert second == f"{default_path}-{os.getpid()}"
    with claim(None, 1) as again:
        assert again == default_path


def test_what_killed_launchers_left_is_swept_away(default_path: str, tmp_path: Path) -> None:
    dead, alive = 2**30, os.getpid()
    for name in (f"usual-{dead}.lock", f"usual-{dead}-0", f"usual-{alive}.lock", f"usual-{alive}-0", "usual-mine.lock"):
        (tmp_path / name).touch()
    with claim(None, 1):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {"usual.lock", f"usual-{alive}.lock", f"usual-{alive}-0", "usual-mine.lock"}


def test_a_given_path_is_claimed_by_one_instance_only(tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    with claim(path, 1), pytest.raises(SettingsError, match="held by another instance"), claim(path, 1):
        pass
    assert not list(tmp_path.iterdir())


def test_stale_sockets_are_removed_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "given"
    left = [[tmp_path / f"given-{rank}", tmp_path / f"given-{rank}.steps"] for rank in range(2)]
    for path_left in left[0]:
        path_left.touch()
    with claim(str(path), 2):
        assert not list(tmp_path.glob("given-*"))
        for path_left in left[1]:
            path_left.touch()
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "given"
    real_open = locks._open
    opened: list[int | None] = []

    def open_then_lose_the_name(name: str) -> int | None:
        descriptor = real_open(name)
        if not opened:
            Path(name).unlink()
        opened.append(descriptor)
        return descriptor

    monkeypatch.setattr(locks, "_open", open_then_lose_the_name)
    with claim(str(path), 1):
        assert len(opened) == 2
        assert (tmp_path / "given.lock").exists()


def test_a_lock_is_removed_by_others_only_when_nobody_holds_it(tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    name = locks.lock_of(path)
    locks.remove_if_free(name)
    assert not list(tmp_path.iterdir())
    with claim(path, 1):
        locks.remove_if_free(name)
        assert Path(name).exists()
    Path(name).touch()
    locks.remove_if_free(name)
    assert not Path(name).exists()


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 107 bytes"), claim("/tmp/" + "x" * 95, 1):
        pass  # the gRPC socket has 102 bytes, the step socket one too many


def test_a_path_in_no_folder_is_refused() -> None:
    with pytest.raises(SettingsError, match="not writable"), claim("/nonexistent/path", 1):
        pass


def test_a_port_is_free_until_someone_listens() -> None:
    port = free_port()
    check_port("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(SettingsError) as caught:
        check_port("0.0.0.0", port)
    name = Path("/proc/self/comm").read_text().strip()
    assert caught.value.message == (
        f"--port {port} is already in use on 0.0.0.0 by process {os.getpid()} ({name}): "
        "stop that process or choose another --port"
    )


def test_the_owner_of_a_port_is_named_where_the_system_says_it(tmp_path: Path) -> None:
    assert owner_of(free_port()) is None
    assert owner_of(3000, tmp_path) is None  # no tables
    (tmp_path / "net").mkdir()
    row = "0: 00000000:0BB8 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    (tmp_path / "net" / "tcp6").write_text("head\n" + row.format(state="01") + "\n")
    descriptors = tmp_path / "42" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("socket:[4711]")
    (tmp_path / "42" / "comm").write_text("python3\n")
    assert owner_of(3000, tmp_path) is None  # a connection, not a listener
    (tmp_path / "net" / "tcp6").write_text("head\n" + row.format(state="0A") + "\n")
    assert owner_of(3000, tmp_path) == "process 42 (python3)"
    (tmp_path / "42" / "comm").write_bytes("\x1b[2Jé".encode()[:-1])
    assert owner_of(3000, tmp_path) == "process 42 (\\x1b[2J\ufffd)"
    assert owner_of(3001, tmp_path) is None


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match="--hostname 203.0.113.9"):
        check_port("203.0.113.9", 3000)


def test_a_name_that_is_no_host_is_refused() -> None:
    with pytest.raises(SettingsError, match="--hostname no.such.host.invalid is not an address"):
        check_port("no.such.host.invalid", 3000)


def test_a_lock_about_to_be_let_go_is_waited_for(tmp_path: Path) -> None:
    name = str(tmp_path / "s.lock")
    held = locks.try_lock(name)
    assert held is not None
    locks.remove_if_free(name, 0.05)
    assert Path(name).exists()
    letting_go = threading.Timer(0.1, os.close, [held])
    letting_go.start()
    locks.remove_if_free(name, 10.0)
    letting_go.join()
    assert not Path(name).exists()
