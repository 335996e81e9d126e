"""The file that names the processes of a deployment: private, whole, and what a process does without a launcher."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel.proto.process.deployment_file import (
    file_of,
    is_launcher_gone,
    logs_of,
    processes_in,
    read,
    remove_deployment_file,
    runs,
    write,
)
from funitel.proto.process.locks import lock_of, try_lock
from funitel.proto.process.start_times import start_of

CHILD = """
import sys, time
from funitel.proto.process.deployment_file import end_with_launcher
end_with_launcher(int(sys.argv[1]), sys.argv[2])
print("follows", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    return file_of(str(tmp_path / "base"))


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *args: object) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", code, *map(str, args)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def launcher(spawn: Any) -> Any:
    return spawn("import time; time.sleep(60)")


def identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": start_of(pid)}


def content(pid: int, adopt_timeout: float, *children: int) -> dict[str, Any]:
    return {
        "launcher": identity(pid),
        "adopt_timeout": adopt_timeout,
        "deployments": [{"replicas": [[identity(child) for child in children]]}],
    }


def child_of(spawn: Any, pid: int, name: str) -> Any:
    child = spawn(CHILD, pid, name)
    assert child.stdout.readline() == "follows\n"
    return child


def test_it_is_private_and_read_back(name: str) -> None:
    write(name, content(os.getpid(), 3, os.getppid()))
    assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    found = read(name)
    assert found is not None
    assert [each["pid"] for each in processes_in(found)] == [os.getpid(), os.getppid()]
    assert os.listdir(os.path.dirname(name)) == [os.path.basename(name)], "nothing is left of writing it"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 9, "launcher": {"pid": 1, "started": 1}, "adopt_timeout": 1}', '{"version": 1}', "{"],
)
def test_another_content_is_no_file(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert read(name) is None


def test_a_file_that_others_can_write_is_not_trusted(name: str, tmp_path: Path) -> None:
    write(name, content(os.getpid(), 3))
    os.chmod(name, 0o622)
    assert read(name) is None
    os.chmod(name, 0o600)
    assert read(name) is not None
    (tmp_path / "link").symlink_to(name)
    assert read(str(tmp_path / "link")) is None
    os.mkfifo(tmp_path / "pipe")
    assert read(str(tmp_path / "pipe")) is None
    assert read(str(tmp_path / "missing")) is None


def test_a_file_that_cannot_be_replaced_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(str(tmp_path / "folder"), content(os.getpid(), 3))
    assert os.listdir(tmp_path) == ["folder"]


def test_a_process_is_told_by_its_start(spawn: Any) -> None:
    process = launcher(spawn)
    there = identity(process.pid)
    assert runs(there)
    assert not runs(there | {"started": there["started"] + 1})
    process.kill()
    process.wait()
    assert not runs(there)
    assert not runs({"pid": 0, "started": 0})


def test_a_child_ends_where_no_launcher_comes_in_time(spawn: Any, name: str) -> None:
    first = launcher(spawn)
    write(name, content(first.pid, 0.3))
    child = child_of(spawn, first.pid, name)
    began = time.monotonic()
    first.kill()
    first.wait()
    assert child.wait(20) == -signal.SIGTERM
    assert time.monotonic() - began >= 0.3


def test_a_child_follows_the_launcher_that_names_it(spawn: Any, name: str) -> None:
    first, second = launcher(spawn), launcher(spawn)
    write(name, content(first.pid, 30))
    child = child_of(spawn, first.pid, name)
    first.kill()
    first.wait()
    assert is_launcher_gone(first.pid, name)
    write(name, content(second.pid, 0.1, child.pid))
    assert not is_launcher_gone(first.pid, name)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1)  # it has seen the file several times
    second.kill()
    second.wait()
    assert child.wait(20) == -signal.SIGTERM


def test_a_child_that_the_next_launcher_does_not_name_ends_at_once(spawn: Any, name: str) -> None:
    first, second = launcher(spawn), launcher(spawn)
    write(name, content(first.pid, 3600))
    child = child_of(spawn, first.pid, name)
    write(name, content(second.pid, 3600, os.getpid()))
    first.kill()
    first.wait()
    assert child.wait(20) == -signal.SIGTERM


def test_a_child_of_a_launcher_that_has_ended_before_ends(spawn: Any, name: str) -> None:
    first = launcher(spawn)
    write(name, content(first.pid, 0))
    first.kill()
    first.wait()
    assert spawn(CHILD, first.pid, name).wait(20) == -signal.SIGTERM


def test_a_child_of_a_launcher_that_has_ended_before_ends_where_the_next_one_does_not_name_it(
    spawn: Any, name: str
) -> None:
    first, second = launcher(spawn), launcher(spawn)
    first.kill()
    first.wait()
    write(name, content(second.pid, 3600, os.getpid()))
    assert spawn(CHILD, first.pid, name).wait(20) == -signal.SIGTERM


def test_without_a_file_a_process_ends_with_its_parent(spawn: Any) -> None:
    assert not is_launcher_gone(None, None)
    assert not is_launcher_gone(os.getppid(), None)
    assert is_launcher_gone(os.getppid() + 1, None)


def test_it_is_removed_with_what_lies_beside_it_unless_a_launcher_has_the_lock(name: str, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    write(name, content(os.getpid(), 3))
    os.mkdir(logs_of(base))
    Path(logs_of(base), "shard.log").write_text("words\n")
    lock = try_lock(lock_of(base))
    assert lock is not None
    remove_deployment_file(name)
    assert read(name) is not None
    os.close(lock)
    remove_deployment_file(name)
    assert os.listdir(tmp_path) == []


def test_the_content_is_one_json_object(name: str) -> None:
    write(name, content(os.getpid(), 3))
    assert json.loads(Path(name).read_text())["version"] == 1
