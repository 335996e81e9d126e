"""Estimate what serving a model takes on this machine, from headers and configurations: no weight is read."""

from pathlib import Path

from funitel.model_server.files.integrity import read_json
from funitel.model_server.registry.choose import choose_spec
from funitel.model_server.registry.encoder_decoders import is_seq2seq, seq2seq_spec_of
from funitel.model_server.registry.encoders import is_encoder
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.tools.models import (
    decoder_estimate,
    encoder_decoder_estimate,
    encoder_estimate,
    transformers_estimate,
)
from funitel.model_server.tools.models.needs import Needs
from funitel.proto.errors import NoRow


def needs_of(settings: ModelsSettings, folder: Path) -> Needs:
    """What serving the model in `folder` takes with these settings.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_json(folder / "config.json")
    if is_encoder(config):
        return encoder_estimate.estimate(settings, folder)
    if settings.model_spec is None and is_seq2seq(config):
        return encoder_decoder_estimate.estimate(settings, folder, seq2seq_spec_of(config))
    try:
        spec = choose_spec(settings.model_spec, folder)
    except NoRow as no_row:
        return transformers_estimate.estimate(settings, folder, no_row)
    return decoder_estimate.estimate(settings, folder, spec)
