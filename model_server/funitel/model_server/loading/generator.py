"""Checkpoint folder -> loaded executor, whichever kind of model that generates text is in it."""

from pathlib import Path

from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.files.integrity import read_json
from funitel.model_server.loading.decoder import load
from funitel.model_server.loading.encoder_decoder import load_seq2seq
from funitel.model_server.loading.executor import LoadedShard
from funitel.model_server.registry.encoder_decoders import is_seq2seq
from funitel.model_server.settings import ModelServerSettings


def load_generator(settings: ModelServerSettings, folder: Path) -> LoadedShard:
    """Load this rank's share of the model in `folder`; blocks until every rank has joined.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    if settings.model_spec is None:
        refuse_described(folder)
        if is_seq2seq(read_json(folder / "config.json")):
            return load_seq2seq(settings, folder)
    return load(settings, folder)
