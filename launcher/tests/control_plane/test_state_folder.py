"""The folder of the state: one process has it; the folder of the sockets is short and private."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from funitel.launcher.control_plane.state_folder import default_state_folder, owning, run_folder
from funitel.proto.errors import SettingsError


def test_the_default_is_below_the_state_home() -> None:
    assert default_state_folder(3000, {"XDG_STATE_HOME": "/s"}) == Path("/s/funitel/3000")
    assert default_state_folder(1, {}) == Path("~/.local/state/funitel/1").expanduser()
    assert default_state_folder(1, {"XDG_STATE_HOME": "relative"}) == Path("~/.local/state/funitel/1").expanduser()


def test_a_second_control_plane_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from funitel.launcher.control_plane.state_folder import owning\n"
        "with owning(Path(sys.argv[1])): print('here', flush=True); sys.stdin.read()"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    root = tmp_path / "state"
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    assert first.stdout.readline() == b"here\n"
    with pytest.raises(SettingsError, match=f"process {first.pid}: stop it") as refused, owning(root):
        pass
    assert "\n" not in refused.value.message
    first.kill()
    first.communicate()
    with owning(root) as owned:  # a lock does not outlive its process
        assert (owned / "lock").read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(owned.stat().st_mode) == 0o700
        assert (owned / "logs").is_dir()
    with owning(root):
        pass


def test_a_state_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--state-dir .*: Not a directory"), owning(tmp_path / "file" / "state"):
        pass


def test_the_folder_of_sockets_is_private_and_the_same_again(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "state")
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        path.chmod(0o755)
        assert run_folder(tmp_path / "state") == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(str(path / "control.sock")) < 60
        other = run_folder(tmp_path / "other")
        assert other != path
        other.rmdir()
    finally:
        path.rmdir()


def test_a_folder_of_sockets_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "state")
    path.rmdir()
    path.symlink_to(tmp_path)
    try:
        with pytest.raises(SettingsError, match="belongs to another user"):
            run_folder(tmp_path / "state")
    finally:
        path.unlink()
    if os.geteuid() == 0:
        path.mkdir()
        shutil.chown(path, "nobody")
        with pytest.raises(SettingsError, match="belongs to another user"):
            run_folder(tmp_path / "state")
        path.rmdir()
