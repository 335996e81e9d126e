"""Choose the model spec of a checkpoint: a JSON file that a user wrote, else the registry's row for config.json."""

from pathlib import Path

from funitel.model_server.files.integrity import read_json
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.json_file import read_spec
from funitel.model_server.spec.model_spec import ModelSpec


def choose_spec(model_spec: str | None, folder: Path) -> ModelSpec:
    """The spec that a user wrote, else the one of the checkpoint's architecture. Raises: `StartupError`."""
    return spec_of(read_json(folder / "config.json")) if model_spec is None else read_spec(Path(model_spec))
