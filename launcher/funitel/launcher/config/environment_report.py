"""Describe the runtime environment for `--env`: system, interpreter, packages and GPUs, for bug reports."""

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from funitel.proto.process.usable_cores import count_usable_cores

PACKAGES = ("funitel", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "grpcio", "uvicorn")


def describe_environment() -> str:
    """Several lines: system, interpreter, packages, and the output of nvidia-smi."""
    return "\n".join(("Runtime environment:", *_lines()))


def _lines() -> Iterator[str]:
    yield f"System: {platform.platform()}, {count_usable_cores()} usable cores"
    yield f"Python: {platform.python_version()}"
    yield from (f"{name}: {_version(name)}" for name in PACKAGES)
    yield f"nvidia-smi: {_nvidia_smi()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _nvidia_smi() -> str:
    try:
        answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available ({type(error).__name__})"
    return f"\n{answer.stdout.rstrip()}"
