"""Folders of a GGUF that only another engine may run: why our own does not, and how that is said."""

from pathlib import Path

from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import UnsupportedModel

GGUF_REFUSAL = "gguf_refusal"
"""In config.json: why no row is for the file."""


def refusal_of(folder: Path) -> str | None:
    """Why our own engine does not run the GGUF of a folder; None where it does, or there is none."""
    found = read_json(folder / "config.json").get(GGUF_REFUSAL)
    return None if found is None else str(found)


def refuse_described(folder: Path) -> None:
    """Raise UnsupportedModel for a folder of a GGUF that only another engine may run."""
    refusal = refusal_of(folder)
    if refusal is not None:
        raise UnsupportedModel(f"{refusal}; --engine llama_cpp runs what llama.cpp knows")


def refuse_gguf(folder: Path, engine: str) -> None:
    """Raise UnsupportedModel for the folder of a GGUF, which `engine` does not read."""
    if (folder / POINTER).is_file():
        raise UnsupportedModel(f"--engine {engine} reads no GGUF: name a checkpoint of safetensors as MODEL_ID")
