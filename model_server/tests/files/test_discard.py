"""Downloads that a program follows and discards."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from funitel.model_server.files import progress
from funitel_testing.fake_hub import FakeHub, running

WORK = """
import sys, time
from pathlib import Path
from funitel.model_server.files.discard import discard_on_signal, discarding
discard_on_signal()
path = Path(sys.argv[1])
path.write_text("half")
try:
    if sys.argv[2] == "library":
        with discarding(lambda: [path]):
            print("ready", flush=True)
            time.sleep(600)
    print("ready", flush=True)
    time.sleep(600)
finally:
    print("cleaned", flush=True)
"""


@pytest.mark.parametrize(("kind", "said", "is_left"), [("library", "", False), ("ours", "cleaned\n", True)])
def test_sigusr1_ends_work_and_removes_what_is_unfinished(tmp_path: Path, kind: str, said: str, is_left: bool) -> None:
    path = tmp_path / "part"
    argv = [sys.executable, "-c", WORK, str(path), kind]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 128 + signal.SIGUSR1
    assert process.stdout.read() == said
    assert path.exists() == is_left
    process.stdout.close()


def test_progress_is_reported_to_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress._Reports, "are_wanted", True)
    work = progress.Progress("unpacking", 100)
    work.advance(40)
    work.finish()
    lines = [json.loads(line)["progress"] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"label": "unpacking", "bytes": 0, "total_bytes": 100}
    assert lines[-1] == {"label": "unpacking", "bytes": 100, "total_bytes": 100}


def test_a_download_from_the_hub_tells_its_bytes(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.gguf": b"0" * 3_000_000}
    with running(FakeHub({"some/model": {"main": files}})) as hub:
        argv = [sys.executable, "-m", "funitel.model_server", "download-weights", "some/model", "--reports-progress"]
        ended = subprocess.run(argv, env=hub.environ(tmp_path), capture_output=True, text=True, timeout=120)
    told = [json.loads(line)["progress"] for line in ended.stdout.splitlines() if line.startswith('{"progress"')]
    fetched = [each for each in told if each["label"] == "downloading"]
    assert fetched, ended.stdout + ended.stderr
    assert fetched[-1]["bytes"] == fetched[-1]["total_bytes"] == 3_000_000
