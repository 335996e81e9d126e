"""The container image, run as an engine would: read-only root, another user than root, no capabilities, PID 1."""

import json
import os
import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.container.build import ROOT, Image
from funitel_testing.container.runtime import Container, running
from funitel_testing.servers import wait_until
from funitel_testing.tiny_gguf import TINY_GGUFS

UID = 1000
ANY_USER = (65432, 0)  # as OpenShift chooses: no entry in /etc/passwd, group 0
MEGABYTE = 1 << 20
MAX_BYTES = 1.5e9  # of the image
TGI_FLAGS = (
    *("--model-id", "/models/tiny", "--dtype", "float32", "--num-shard", "1", "--sharded", "false"),
    *("--max-concurrent-requests", "16", "--max-input-tokens", "4096", "--max-total-tokens", "8192"),
    *("--max-batch-prefill-tokens", "4096", "--max-batch-total-tokens", "16384", "--json-output"),
)
LONG = 2000  # tokens: an answer that is still running when the container is stopped


def data_of(folder: Path, user: tuple[int, int] = (UID, 0)) -> Path:
    """A volume that a user can write."""
    folder.mkdir()
    folder.chmod(0o770)
    os.chown(folder, *user)
    return folder


@pytest.fixture(scope="module")
def served(image: Image, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """The image as it is, with TGI's flags after its name and a model mounted read-only."""
    folder = tmp_path_factory.mktemp("served")
    mounts = {"/data": data_of(folder / "data"), "/models": models}
    environ = {"HF_HUB_ENABLE_HF_TRANSFER": "1"}  # which TGI's image sets, and its compose files repeat
    with running(image, folder, *TGI_FLAGS, environ=environ, mounts=mounts, read_only=["/models"]) as container:
        yield container


def test_the_image_says_what_it_is(image: Image) -> None:
    config, project = image.config, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert (labels["title"], labels["version"], labels["licenses"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
    assert (config["User"], config["StopSignal"]) == ("1000:0", "SIGTERM")
    assert (list(config["ExposedPorts"]), list(config["Volumes"])) == (["80/tcp"], ["/data"])
    assert config["Entrypoint"] == ["text-generation-launcher"]


def test_what_only_a_build_needs_is_not_in_it(image: Image) -> None:
    programs = {path.name for folder in ("usr/bin", "opt/funitel/bin") for path in (image.root / folder).iterdir()}
    assert not programs & {"gcc", "g++", "cc", "c++", "clang", "uv", "pytest", "git"}
    (packages,) = (image.root / "opt/funitel/lib").glob("python3.*/site-packages")
    assert not [
        path.name for path in packages.iterdir() if re.match(r"nvidia|triton|pytest|mypy|matplotlib", path.name)
    ]
    assert not list(packages.glob("funitel/*/tests"))
    assert not [name for name in ("root/.cache", "src", "etc/pip.conf") if (image.root / name).exists()]


def test_nothing_has_to_be_compiled_to_bytecode_at_each_start(image: Image) -> None:
    (packages,) = (image.root / "opt/funitel/lib").glob("python3.*/site-packages")
    for module in ("torch", "transformers", "funitel/launcher"):
        assert list((packages / module / "__pycache__").glob("__init__.*.pyc")), module


def test_its_size(image: Image, figures: dict[str, object]) -> None:
    (packages,) = (image.root / "opt/funitel/lib").glob("python3.*/site-packages")
    torch, ours = _size(packages / "torch"), _size(packages / "funitel")
    rest = _size(image.root / "opt/funitel") - torch - ours
    system = _size(image.root) - torch - ours - rest
    parts = {"torch": torch, "other packages": rest, "funitel": ours, "Debian and Python": system}
    for name, size in parts.items():
        figures[f"image, {name} [MB]"] = round(size / 1e6)
    figures["image [MB]"] = round(sum(parts.values()) / 1e6)
    assert sum(parts.values()) < MAX_BYTES


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def test_it_serves_a_model_that_is_mounted_read_only(served: Container) -> None:
    status, answer = served.call(80, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8}})
    assert status == 200
    assert answer["generated_text"]
    body = {"model": "tgi", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    status, answer = served.call(80, "/v1/chat/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    _, info = served.call(80, "/info")
    assert (info["model_id"], info["max_concurrent_requests"], info["max_input_tokens"]) == ("/models/tiny", 16, 4096)


def test_its_health_check_asks_the_server(served: Container) -> None:
    checked = served.health()
    assert (checked.returncode, checked.stdout) == (0, "http://127.0.0.1:80/health answers 200\n")


def test_no_process_is_roots_or_may_become_it(served: Container) -> None:
    pids = served.processes()
    assert len(pids) >= 3, "launcher, shard, router"
    for pid in pids:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert status["Uid"].split() == [str(UID)] * 4
        assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")


def test_the_root_cannot_be_written_and_nothing_tried_to(served: Container) -> None:
    assert "Read-only file system" in served.run("touch", "/opt/funitel/x").stderr
    assert served.run("touch", "/data/x", "/tmp/x").returncode == 0
    assert "Read-only file system" not in served.log


def test_the_fused_step_of_the_wheel_serves_without_a_compiler(served: Container) -> None:
    assert "prebuilt CPU step source=engine.cpp" in served.log
    script = "from importlib.metadata import distribution as of; print(of('funitel').read_text('WHEEL'))"
    assert "\nTag: py3-none-manylinux_2_28_x86_64\n" in served.run("/opt/funitel/bin/python", "-c", script).stdout


def test_orphans_are_reaped(served: Container) -> None:
    before = set(served.processes())
    assert served.run("/bin/sh", "-c", "sleep 0.2 & exec true").returncode == 0
    wait_until(lambda: set(served.processes()) <= before, 10, "an orphan is left, or stays as a zombie")
    assert "Z" not in served.processes().values()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_running_streams_end(image: Image, models: Path, tmp_path: Path, number: signal.Signals) -> None:
    """As any user, on a port given after the image's name, with a memory limit, which the server sees."""
    mounts = {"/data": data_of(tmp_path / "data", ANY_USER), "/models": models}
    flags = ("--model-id", "/models/tiny", "--dtype", "float32", "--port", "3000")
    options: dict[str, Any] = {"user": ANY_USER, "memory_bytes": 2048 * MEGABYTE, "read_only": ["/models"]}
    with running(image, tmp_path / "run", *flags, port=3000, mounts=mounts, **options) as container:
        assert container.health().returncode == 0
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": LONG, "details": True}}
        with container.request(3000, "/generate_stream", body) as stream:
            lines = (line for line in stream if line.startswith(b"data:"))
            next(lines)
            container.signal(number)
            last = json.loads(list(lines)[-1].removeprefix(b"data:"))
        assert last["details"]["generated_tokens"] == LONG
        assert container.wait() == 0
        assert "Traceback" not in container.log


def test_a_memory_limit_that_is_too_small_is_named(image: Image, models: Path, tmp_path: Path) -> None:
    mounts = {"/data": data_of(tmp_path / "data"), "/models": models}
    flags = ("--model-id", "/models/tiny", "--max-batch-total-tokens", str(10**8))
    container = Container(image, tmp_path / "run", *flags, mounts=mounts, memory_bytes=1024 * MEGABYTE)
    try:
        assert container.wait() == 1
        assert re.search(r"^error: .*/sys/fs/cgroup/\S+ leaves", container.log, re.MULTILINE), container.log
    finally:
        container.remove()


def test_a_volume_that_cannot_be_written_is_one_line(image: Image, models: Path, tmp_path: Path) -> None:
    """As after a change from an image that ran as root: its volume is root's."""
    data = data_of(tmp_path / "data", (0, 0))
    data.chmod(0o755)
    gguf = tmp_path / "tiny.gguf"
    TINY_GGUFS["llama"].write(gguf, "llama")
    mounts = {"/data": data, "/models/tiny.gguf": gguf}
    container = Container(image, tmp_path / "run", "--model-id", "/models/tiny.gguf", mounts=mounts)
    try:
        assert container.wait() == 1
        errors = [line for line in container.log.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "/data/funitel" in errors[0]
        assert "user 1000 can write" in errors[0]
    finally:
        container.remove()


def test_sagemakers_entry_point(sagemaker_image: Image, models: Path, tmp_path: Path) -> None:
    mounts = {"/data": data_of(tmp_path / "data"), "/opt/ml/model": models / "tiny"}
    environ = {"HF_MODEL_ID": "/opt/ml/model", "SM_NUM_GPUS": "1", "MAX_TOTAL_TOKENS": "512"}
    options: dict[str, Any] = {"environ": environ, "mounts": mounts, "read_only": ["/opt/ml/model"], "port": 8080}
    with running(sagemaker_image, tmp_path / "run", "serve", **options) as container:
        assert container.call(8080, "/ping")[0] == 200
        status, answer = container.call(8080, "/invocations", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}})
        assert status == 200
        assert answer[0]["generated_text"]
        assert container.health().returncode == 0
        container.signal(signal.SIGTERM)
        assert container.wait() == 0


def test_sagemaker_without_a_model_says_so(sagemaker_image: Image, tmp_path: Path) -> None:
    container = Container(sagemaker_image, tmp_path / "run", mounts={"/data": data_of(tmp_path / "data")})
    try:
        assert container.wait() == 1
        assert container.log == "error: HF_MODEL_ID is not set: give the model to serve\n"
    finally:
        container.remove()
