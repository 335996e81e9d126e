"""The container's shape: its entry points, run here as scripts, and what the Dockerfile promises."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SAGEMAKER = ROOT / "scripts" / "sagemaker-entrypoint.sh"
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}))
sys.exit(3)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which the launcher only says how it was started."""
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text(STAND_IN)
    launcher.chmod(0o755)
    return f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"


def run(path: str, *argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(SAGEMAKER), *argv], env={"PATH": path} | environ, capture_output=True, text=True)


def test_sagemakers_variables_become_the_launchers(path: str) -> None:
    result = run(
        path,
        "serve",
        HF_MODEL_ID="org/model",
        HF_MODEL_REVISION="v2",
        SM_NUM_GPUS="4",
        HF_MODEL_QUANTIZE="gptq",
        HF_MODEL_TRUST_REMOTE_CODE="true",
        MAX_BATCH_SIZE="8",
    )
    started = json.loads(result.stdout)
    assert result.returncode == 3, "the launcher's exit code is the container's"
    assert started["argv"] == ["--port", "8080"]
    told = {name: started["environ"].get(name) for name in ("MODEL_ID", "REVISION", "NUM_SHARD", "QUANTIZE")}
    assert told == {"MODEL_ID": "org/model", "REVISION": "v2", "NUM_SHARD": "4", "QUANTIZE": "gptq"}
    assert (started["environ"]["TRUST_REMOTE_CODE"], started["environ"]["MAX_BATCH_SIZE"]) == ("true", "8")


def test_what_sagemaker_does_not_say_is_left_open(path: str) -> None:
    environ = json.loads(run(path, HF_MODEL_ID="/opt/ml/model").stdout)["environ"]
    assert environ["MODEL_ID"] == "/opt/ml/model"
    assert not {"REVISION", "NUM_SHARD", "QUANTIZE", "TRUST_REMOTE_CODE"} & environ.keys()


def test_without_a_model_it_says_so(path: str) -> None:
    result = run(path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: HF_MODEL_ID is not set: give the model to serve\n"


def stages() -> dict[str, str]:
    """Each stage of the Dockerfile by its name; the last one, which is built by default, under an empty one."""
    parts = re.split(r"^FROM (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    named = [line.partition(" AS ")[2] for line in parts[::2]]
    return dict(zip(named, parts[1::2], strict=True))


def test_the_image_has_tgis_shape() -> None:
    found = stages()
    assert 'ENTRYPOINT ["text-generation-launcher"]' in found[""]
    assert "EXPOSE 80" in found[""]
    for promise in ("HF_HOME=/data", "FUNITEL_DEFAULT_PORT=80", "STOPSIGNAL SIGTERM", "VOLUME /data"):
        assert promise in found["serving"]
    assert "HUGGINGFACE_HUB_CACHE" not in found["serving"], "TGI's image keeps models in /data/hub"


def test_the_sagemaker_entry_point_is_in_the_image() -> None:
    (entry,) = re.findall(r'ENTRYPOINT \["(.*)"\]', stages()["sagemaker"])
    assert entry == SAGEMAKER.name
    assert f"COPY {SAGEMAKER.relative_to(ROOT)} " in stages()["sagemaker"]
    assert SAGEMAKER.stat().st_mode & 0o111
