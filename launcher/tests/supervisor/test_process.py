"""One child process: its lines, its end, its last words."""

import asyncio
import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from funitel.launcher.processes.relay import relay
from funitel.launcher.supervisor.download import Download
from funitel.launcher.supervisor.process import MAX_LINE_BYTES, Child
from funitel.proto.errors import StartupError


async def run(code: str) -> tuple[Child, list[str]]:
    lines: list[str] = []
    child = Child("child", [sys.executable, "-c", code], dict(os.environ), lines.append)
    await child.start()
    await child.wait()
    return child, lines


async def test_lines_of_both_streams_are_handed_on() -> None:
    child, lines = await run(
        "import sys; print('out', flush=True); print('err', file=sys.stderr); print('end', end='')"
    )
    assert lines == ["out", "err", "end"]
    assert child.exited.result() == 0


async def test_the_last_error_line_is_kept() -> None:
    child, _ = await run("import sys; print('error: first'); print('error: second'); print('bye'); sys.exit(4)")
    assert child.exit_reason() == "child exited with code 4: last error: second"


async def test_without_an_error_line_the_last_line_is_told() -> None:
    child, _ = await run("raise ValueError('no way')")
    assert child.exit_reason() == "child exited with code 1: last line: ValueError: no way"


async def test_a_silent_end_by_signal_is_named() -> None:
    child, _ = await run("import os; os.kill(os.getpid(), 11)")
    assert child.exit_reason() == "child exited with code -11 (killed by SIGSEGV)"


async def test_a_line_without_end_is_cut() -> None:
    _, lines = await run(f"print('x' * {2 * MAX_LINE_BYTES}, end='')")
    assert "".join(lines) == "x" * (2 * MAX_LINE_BYTES)
    assert max(map(len, lines)) < 2 * MAX_LINE_BYTES


async def test_bytes_that_are_no_text_are_replaced() -> None:
    _, lines = await run(r"import sys; sys.stdout.buffer.write(b'caf\xe9\r\n')")
    assert lines == ["caf\ufffd"]


async def test_a_grandchild_that_keeps_the_pipe_open_does_not_hide_the_end() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    async with asyncio.timeout(10):
        child, _ = await run(code)
    assert child.exited.result() == 0


async def test_stop_is_patient_and_then_firm() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    up = asyncio.Event()
    child = Child("child", [sys.executable, "-c", code], dict(os.environ), lambda _: up.set())
    await child.start()
    await up.wait()
    assert not await child.stop(0.1)
    assert child.exited.result() == -9
    assert await child.stop(0.1), "stopping what has ended is no failure"


async def test_stopping_what_never_started_is_nothing() -> None:
    assert await Child("child", ["true"], {}, print).stop(1)


def test_relay_prefixes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    relay("shard 0", json_output=False)("hello")
    assert capsys.readouterr().err == "shard 0 | hello\n"


class FullDisk(io.StringIO):
    """Where nothing can be written."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_child_does_not_wait_for_lines_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print(('x' * 99 + '\\n') * 4000, end='')"  # more than a pipe holds
    child = Child("child", [sys.executable, "-c", code], dict(os.environ), relay("child", json_output=False))
    monkeypatch.setattr(sys, "stderr", FullDisk())
    async with asyncio.timeout(10):
        await child.start()
        assert await child.wait() == 0


def test_relay_in_json_rewrites_what_shards_log_as_the_launchers_own(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"level": {"name": "WARNING"}, "message": "warm", "name": "a.b", "time": {"timestamp": 1.5}}
    record["extra"] = {"request_id": "r-1"}
    relay("shard 1", json_output=True)(json.dumps({"text": "any", "record": record}))
    assert json.loads(capsys.readouterr().err) == {
        "timestamp": "1970-01-01T00:00:01.500000Z",
        "level": "WARN",
        "message": "warm",
        "target": "a.b",
        "process": "shard-1",
        "request_id": "r-1",
    }


async def test_what_a_download_logs_is_handed_on_and_is_no_folder(capfd: pytest.CaptureFixture[str]) -> None:
    record = {"level": {"name": "INFO"}, "message": "fetching", "name": "hub", "time": {"timestamp": 1.5}}
    line = json.dumps({"text": "any", "record": record})
    code = f"print('/the/folder'); print({line!r})"
    assert await Download([sys.executable, "-c", code], dict(os.environ)).folder() == Path("/the/folder")
    assert json.loads(capfd.readouterr().err)["message"] == "fetching"


async def test_stderr_of_a_download_is_json_where_logs_are(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('50%', file=sys.stderr); print('/the/folder'); print('error: no', file=sys.stderr)"
    download = Download([sys.executable, "-c", code], dict(os.environ), json_output=True)
    assert await download.folder() == Path("/the/folder")
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(event["level"], event["process"], event["message"]) for event in events] == [
        ("INFO", "download", "50%"),
        ("ERROR", "download", "error: no"),
    ]
    await Download([sys.executable, "-c", code], dict(os.environ)).folder()
    assert capfd.readouterr().err == "50%\nerror: no\n"


def test_relay_in_json_wraps_only_what_is_not_json(capsys: pytest.CaptureFixture[str]) -> None:
    on_line = relay("shard 0", json_output=True)
    on_line('{"level": "INFO"}')
    on_line("error: no")
    on_line("{not json")
    first, *wrapped = capsys.readouterr().err.splitlines()
    assert first == '{"level": "INFO"}'
    events = [json.loads(line) for line in wrapped]
    assert [(e["level"], e["process"], e["message"]) for e in events] == [
        ("ERROR", "shard-0", "error: no"),
        ("INFO", "shard-0", "{not json"),
    ]


async def test_a_child_has_a_working_directory_though_the_launchers_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries of a shard do not load without one; releases are removed under servers that run."""
    gone = tmp_path / "release"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    child, lines = await run("import os; print(os.getcwd())")
    assert (child.exited.result(), lines) == (0, ["/"])


async def test_a_child_that_cannot_be_started_has_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a replica is started again later: processes may be short for a moment."""

    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    child = Child("shard rank 0", ["shard"], {}, print)
    await child.start()
    assert await child.wait() == 1
    reason = "last error: cannot be started: Resource temporarily unavailable"
    assert child.exit_reason() == f"shard rank 0 exited with code 1: {reason}"
    assert (child.has_started, child.has_exited, await child.stop(1)) == (False, True, True)
    with pytest.raises(StartupError, match=f"^download exited with code 1: {reason}$"):
        await Download(["download"], {}).folder()
