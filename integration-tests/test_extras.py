"""Without the packages of an extra, each command that needs them says in one line what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "gguf", "accelerate")
# Read by every interpreter that starts: the packages of these names are not there.
BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {names!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocker())
"""


def run(tmp_path: Path, blocked: tuple[str, ...], *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python where the packages `blocked` cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(names=blocked))
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    environ = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "FUNITEL_CACHE": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, *words], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "funitel"),
        ("-m", "funitel", "serve", "--model-id", "owner/model"),
        ("-m", "funitel", "models"),
        ("-m", "funitel", "models", "owner/model"),
        ("-m", "funitel", "spec", "show", "owner/model"),
        ("-m", "funitel", "bench", "kernels"),
        ("-m", "funitel", "perplexity", "owner/model", "--text", "no-such-file"),
        ("-m", "funitel", "generate", "hello", "--model-id", "no-such-model"),
        ("-m", "funitel.model_server", "serve", "owner/model"),
        ("-m", "funitel.model_server", "download-weights", "owner/model"),
        ("-m", "funitel.model_server", "quantize", "owner/model", "folder"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_what_needs_the_server_extra_says_so_in_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = run(tmp_path, SERVER, *words)
    assert (result.returncode, result.stdout) == (1, "")
    *waits, line = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("not installed, such as torch: pip install 'funitel[server]'")
    # A client waits for a server that is starting on the usual port, and another test may have one there.
    assert all(each.startswith("http://127.0.0.1:3000: ") for each in waits)


def test_one_package_that_is_missing_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, ("gguf",), "-m", "funitel", "models")
    assert result.stderr.endswith("not installed, such as gguf: pip install 'funitel[server]'\n")


def test_the_library_says_what_to_install(tmp_path: Path) -> None:
    code = "try:\n    from funitel.llm import LLM\nexcept ImportError as error:\n    print(error)"
    result = run(tmp_path, SERVER, "-c", code)
    assert result.stdout == (
        "funitel.llm needs packages that are not installed, such as torch: pip install 'funitel[server]'\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "funitel", "--version"),
        ("-m", "funitel", "--help"),
        ("-m", "funitel", "bench", "--help"),
        ("-m", "funitel", "top", "--help"),
        ("-m", "funitel", "key", "--help"),
        ("-m", "funitel.router", "--help"),
        ("-m", "funitel.router", "print-schema"),
        ("-m", "funitel.model_server", "serve", "--help"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_what_needs_no_torch_works_without_the_server_extra(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = run(tmp_path, tuple({*SERVER} - {"huggingface_hub"}), *words)  # which tokenizers brings
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "funitel", "--model-id", "owner/model"),
        ("-m", "funitel.router", "--master-shard-uds-path", "none"),
        ("-m", "funitel.model_server", "serve", "owner/model"),
    ],
    ids=lambda words: words[1],
)
def test_tracing_needs_the_otlp_extra(tmp_path: Path, words: tuple[str, ...]) -> None:
    blocked = ("opentelemetry.exporter", "opentelemetry.sdk")
    result = run(tmp_path, blocked, *words, "--otlp-endpoint", "http://localhost:4317")
    assert result.returncode == 1, result.stdout
    assert result.stderr.splitlines()[-1].endswith("pip install 'funitel[otlp]'")
    assert "Traceback" not in result.stderr


def test_every_module_can_be_imported_without_the_otlp_extra_but_the_exporter(tmp_path: Path) -> None:
    result = run(tmp_path, ("opentelemetry.exporter", "opentelemetry.sdk"), "-W", "error", "-c", IMPORT_ALL)
    assert result.stdout.splitlines() == ["funitel.proto.tracing.otlp"], result.stderr


IMPORT_ALL = """
import importlib, importlib.util, pkgutil
import funitel

without_triton = importlib.util.find_spec("triton") is None
for module in sorted(found.name for found in pkgutil.walk_packages(funitel.__path__, "funitel.")):
    if module == "funitel.__main__" or (without_triton and "kernels" in module):
        continue
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        print(module)
"""
