"""Checkpoint folder -> loaded executor, whichever kind of model that generates text is in it."""

from pathlib import Path

from funitel.model_server.checkpoint import read_json
from funitel.model_server.executor import Executor
from funitel.model_server.loading import load
from funitel.model_server.seq2seq.families import is_seq2seq
from funitel.model_server.seq2seq.loading import load_seq2seq
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import ShardInfo


def load_generator(settings: ModelServerSettings, folder: Path) -> tuple[Executor, ShardInfo]:
    """Load this rank's share of the model in `folder`; blocks until every rank has joined.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    if settings.model_spec is None and is_seq2seq(read_json(folder / "config.json")):
        return load_seq2seq(settings, folder)
    return load(settings, folder)
