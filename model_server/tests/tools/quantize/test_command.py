"""The command as its users see it: a folder on stdout, one line when it fails, nothing left of a run cut short."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.files.manifest import MANIFEST, VERIFIED
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize import command
from funitel.proto.errors import SettingsError, StartupError, WeightsError
from funitel_testing.tiny import save_tiny

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def start(*argv: str) -> "subprocess.Popen[str]":
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    line = [sys.executable, "-m", "funitel.model_server", "quantize", *argv]
    return subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_prints_the_folder_and_its_work(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", **SIZES)
    argv = [str(tmp_path / "model"), str(tmp_path / "out"), "--act-order", "--groupsize", "32", "--percdamp", "0.05"]
    process = start(*argv, "--num-samples", "2", "--num-threads", "1", "--logger-level", "INFO", "--trust-remote-code")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout == f"{tmp_path / 'out'}\n"
    for said in (
        "--trust-remote-code is accepted and changes nothing",
        "quantising: 100%",
        "layers=21 kept=0",
        "mean_output_error=",
    ):
        assert said in stderr


def test_a_refusal_is_one_line_and_a_usage_error_exit_code_2(tmp_path: Path) -> None:
    refused = start(str(tmp_path), str(tmp_path / "out"), "--groupsize", "7")
    assert refused.communicate(timeout=60)[1] == (
        "error: --groupsize must be -1 or a positive multiple of 8, given 7\n"
    )
    assert refused.returncode == 1
    unknown = start(str(tmp_path), str(tmp_path / "out"), "--method", "awq")
    assert unknown.communicate(timeout=60)[1] == (
        "error: Invalid value for '--method': 'awq' is not one of gptq, int8, q4, none\n"
    )
    assert unknown.returncode == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    save_tiny("llama", tmp_path / "model", num_hidden_layers=30, **SIZES)
    process = start(str(tmp_path / "model"), str(tmp_path / "out"), "--num-threads", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("quantising: 0%"):
            break
    assert (tmp_path / ".out.partial").is_dir()
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Hub:
    """Stands in for the hub's client."""

    calls: list[tuple[str, Any]]
    failure: Exception | None

    def whoami(self) -> None:
        if self.failure is not None:
            raise self.failure

    def create_repo(self, repository: str, *, exist_ok: bool) -> None:
        assert exist_ok
        self.calls.append(("create", repository))

    def upload_folder(self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
        names = sorted(path.name for path in folder_path.iterdir() if path.name not in ignore_patterns)
        self.calls.append(("upload", (repo_id, names)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.calls, Hub.failure = [], None
    monkeypatch.setattr(command, "HfApi", Hub)
    return Hub


def test_the_finished_folder_is_uploaded(tmp_path: Path, hub: type[Hub]) -> None:
    model = save_tiny("llama", tmp_path / "model")
    fields = {"model_id": str(model), "output_dir": str(tmp_path / "out"), "method": "int8", "device": "cpu"}
    command.run(QuantizeSettings(**fields, upload_to_model_id="someone/small"))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    names.remove(VERIFIED)  # says what this machine has read
    assert MANIFEST in names
    assert hub.calls == [("create", "someone/small"), ("upload", ("someone/small", names))]


@pytest.mark.parametrize(
    "how", [{"method": "int8"}, {"method": "none"}, {"to": "a16w8"}], ids=["int8", "none", "blocks"]
)
def test_d18_damaged_weights_are_told_before_they_are_served(tmp_path: Path, how: dict[str, Any]) -> None:
    """A damaged byte leaves the file as large as it was; other files may be edited."""
    model, out = save_tiny("llama", tmp_path / "model", **SIZES), tmp_path / "out"
    command.run(QuantizeSettings(model_id=str(model), output_dir=str(out), device="cpu", num_threads=1, **how))
    (out / "generation_config.json").write_text("{}")
    assert resolve(str(out)).folder == out
    path = out / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        WeightsError, match="model.safetensors is damaged: of its bytes from 0 on, the checksum differs"
    ):
        resolve(str(out))


@pytest.mark.parametrize(
    ("repository", "failure", "expected", "message"),
    [
        ("nobody", None, SettingsError, "must be OWNER/NAME, given 'nobody'"),
        ("a/b", OSError("no route"), StartupError, "the hub refused: no route"),
        ("a/b", command.LocalTokenNotFoundError("?"), StartupError, "no token for the hub, set HF_TOKEN"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, hub: type[Hub], repository: str, failure: Exception, expected: type[Exception], message: str
) -> None:
    hub.failure = failure
    with pytest.raises(expected, match=message):
        command.run(QuantizeSettings(model_id="m", output_dir=str(tmp_path / "out"), upload_to_model_id=repository))
    assert list(tmp_path.iterdir()) == []
