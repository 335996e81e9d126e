"""What a machine says of itself, which flags of a shard it takes, and how its processes end."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.machine.facts import (
    available_bytes,
    check_own_address,
    interface_of,
    memory_bytes,
    port_for,
    visible_gpus,
)
from funitel.launcher.machine.rank_flags import check_flags, flags_to_send, value_of
from funitel.launcher.machine.shard_process import ShardProcess
from funitel.proto.errors import SettingsError, StartupError


def meminfo(root: Path) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")


def test_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    meminfo(tmp_path)
    assert memory_bytes(tmp_path) == 4000 * 1024
    assert available_bytes(tmp_path) == 3000 * 1024


def test_memory_is_bounded_by_a_control_group_without_its_cache(tmp_path: Path) -> None:
    meminfo(tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("0::/mine\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = tmp_path / "sys/fs/cgroup/mine"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("2048000\n")
    (group / "memory.current").write_text("1500000\n")
    (group / "memory.stat").write_text("anon 100\ninactive_file 500000\n")
    assert memory_bytes(tmp_path) == 2048000
    assert available_bytes(tmp_path) == 1048000


def test_gpus_are_those_that_cuda_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a1")
    assert visible_gpus() == ("3", "GPU-a1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == ()


def test_gpus_are_listed_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus() == ("0", "1")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus() == ()


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("no-such-host.invalid") is None


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    check_own_address("127.0.0.1", "--listen")
    with pytest.raises(SettingsError, match=r"--listen 192.0.2.1 is not an address of this machine"):
        check_own_address("192.0.2.1", "--listen")


def test_a_port_is_the_wanted_one_unless_it_is_taken() -> None:
    free = port_for("127.0.0.1", 0)
    assert port_for("127.0.0.1", free) == free
    with socket.create_server(("127.0.0.1", free)):
        assert port_for("127.0.0.1", free) not in (0, free)


# Flags --------------------------------------------------------------------------------------------------------------


def test_flags_that_the_machine_decides_are_not_sent() -> None:
    line = ["--revision", "main", "--uds-path", "/tmp/x", "--dtype", "float32", "--sharded", "--prefix-caching", "true"]
    assert flags_to_send(line) == ("--dtype", "float32", "--prefix-caching", "true")
    assert value_of(["--num-threads", "2"], "--num-threads") == "2"
    assert value_of(["--sharded"], "--num-threads") is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["rm"], "'rm' is no flag of a shard"),
        (["--nonsense", "1"], "--nonsense is no flag of a shard of this release"),
        (["--listen", "0.0.0.0:1"], "--listen is decided by the machine of the shard"),
        (["--dtype", "float32", "float16"], "--dtype has more than one value"),
    ],
)
def test_a_flag_that_is_none_of_a_shard_is_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        check_flags(flags)


def test_every_flag_that_the_launcher_gives_a_shard_is_sent_or_decided_here(resolved: object) -> None:
    line = Commands().shard(resolved, Path("/model"), 0)  # type: ignore[arg-type]
    sent = flags_to_send(line[len(Commands().model_server) + 2 :])
    check_flags(sent)
    assert "--block-size" in sent


# Processes ----------------------------------------------------------------------------------------------------------


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


async def test_a_process_tells_its_last_error_line() -> None:
    lines: list[str] = []
    text = "import sys; print('error: no memory', file=sys.stderr); print('bye'); sys.exit(3)"
    process = ShardProcess("shard rank 0", script(text), os.environ, lines.append)
    await process.start()
    assert await process.exited == "shard rank 0 exited with code 3: last error: no memory"
    assert lines == ["no memory"]


async def test_a_process_without_an_error_tells_its_last_line_and_its_signal() -> None:
    text = "import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    process = ShardProcess("shard", script(text), os.environ, lambda _: None)
    await process.start()
    assert await process.exited == "shard exited with code -9 (killed by SIGKILL): last line: so far"


async def test_a_line_longer_than_the_limit_is_survived() -> None:
    text = "import sys; sys.stdout.write('x' * (3 << 20) + '\\n'); print('error: end')"
    process = ShardProcess("shard", script(text), os.environ, lambda _: None)
    await process.start()
    assert (await process.exited).endswith("last error: end")


async def test_a_stubborn_process_is_killed_after_the_grace() -> None:
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('error: deaf', flush=True); time.sleep(60)"
    )
    is_deaf = asyncio.Event()
    process = ShardProcess("shard", script(text), os.environ, lambda _: is_deaf.set())
    await process.start()
    await is_deaf.wait()
    await process.stop(0.3)
    assert "SIGKILL" in process.exited.result()


async def test_a_program_that_is_not_there_is_one_line() -> None:
    process = ShardProcess("shard", ["/no/such/program"], os.environ, lambda _: None)
    with pytest.raises(StartupError, match=r"^shard cannot be started: No such file or directory$"):
        await process.start()
