"""Estimate what serving a model takes on this machine, from headers and configurations: no weight is read."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from funitel.model_server.checkpoint.sparse_tensor import dense_files
from funitel.model_server.checkpoint.storage import open_file
from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.kv_cache.precision import kv_label
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.registry.encoder_decoders import is_seq2seq, seq2seq_spec_of
from funitel.model_server.registry.encoders import encoder_spec_of, is_encoder
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.tools.models import (
    drafter_estimate,
    seq2seq_estimate,
    transformers_estimate,
)
from funitel.model_server.tools.models.needs import Needs, with_memory
from funitel.proto.errors import NoRow, SettingsError


def kind_of(config: Mapping[str, Any]) -> str:
    """What a `config.json` describes: decoder, encoder or encoder-decoder."""
    return "encoder" if is_encoder(config) else "encoder-decoder" if is_seq2seq(config) else "decoder"


def needs_of(settings: ModelsSettings, folder: Path) -> Needs:
    """What serving the model in `folder` takes with these settings.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_json(folder / "config.json")
    if is_encoder(config):
        return _encoder_needs(settings, folder)
    if settings.model_spec is None and is_seq2seq(config):
        return seq2seq_estimate.estimate_seq2seq(settings, folder, seq2seq_spec_of(config))
    refuse_described(folder)
    try:
        spec = choose_spec(settings.model_spec, folder)
    except NoRow as no_row:
        return transformers_estimate.estimate(settings, folder, no_row)
    return drafter_estimate.estimate(settings, folder, spec)


def _encoder_needs(settings: ModelsSettings, folder: Path) -> Needs:
    """What the encoder takes. Raises: `StartupError`."""
    if settings.num_shard > 1:
        raise SettingsError(
            f"--num-shard {settings.num_shard}: an encoder is not split over shards, but runs in replicas"
        )
    device = choose_device(settings.device, 0)
    dtype = choose_dtype(settings.dtype, device)
    spec = encoder_spec_of(read_json(folder / "config.json"))
    facts = Needs(
        architecture=spec.architecture,
        served_by="torch, as an encoder",
        precision=kv_label(dtype),
        context=spec.max_tokens,
        weights=(_count_elements(folder) * dtype.itemsize,),
    )
    return with_memory(facts, settings)


def _count_elements(folder: Path) -> int:
    files = dense_files({name: file for file, names in map(open_file, weight_files(folder)) for name in names})
    return sum(prod(file.get_slice(name).get_shape()) for name, file in files.items())
