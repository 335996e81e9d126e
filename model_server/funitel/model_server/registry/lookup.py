"""Look up the ModelSpec of a Hugging Face `config.json` in the table of decoders."""

from pathlib import Path

from funitel.model_server.files.integrity import read_json
from funitel.model_server.registry.class_defaults import CLASS_DEFAULTS
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.row import Config, reading_config
from funitel.model_server.spec.json_file import check_types, read_spec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import NoRow, UnsupportedModel


def spec_of(config: Config) -> ModelSpec:
    """Derive the spec of a checkpoint from its `config.json`. A field left out means what transformers takes for it.

    Raises:
        NoRow: the architecture, or a choice it makes, is in no row of the table.
        UnsupportedModel: a field is missing, or has a value of the wrong kind.
    """
    architectures = config.get("architectures") or []
    architecture = next((name for name in architectures if name in FAMILIES), None)
    if architecture is None:
        raise NoRow(
            f"architecture {', '.join(architectures) or 'not named in config.json'} is not supported: docs/models.md "
            f"lists the {len(FAMILIES)} that are, and --model-spec can describe another",
            why="no row of the table is for it",
        )
    with reading_config(architectures[0]):
        try:
            spec = FAMILIES[architecture].spec({**CLASS_DEFAULTS.get(architecture, {}), **config})
        except UnsupportedModel as error:
            raise NoRow(error.message) from error
    try:
        check_types(spec)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"config.json of {architectures[0]}: {error.message}") from error
    return spec


def choose_spec(model_spec: str | None, folder: Path) -> ModelSpec:
    """The spec that a user wrote, else the one of the checkpoint's architecture. Raises: `StartupError`."""
    return spec_of(read_json(folder / "config.json")) if model_spec is None else read_spec(Path(model_spec))
