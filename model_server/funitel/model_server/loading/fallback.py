"""Load a model through transformers: where no row of the table describes it, or the settings ask for it."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from funitel.model_server.files.gguf_refusal import refuse_gguf
from funitel.model_server.loading.common import choose_dtype, find_eos, join_ranks, refuse_stages
from funitel.model_server.loading.executor import LoadedShard, make_executor
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import TRANSFORMERS, ModelServerSettings
from funitel.proto.errors import NoRow, SettingsError

logger = logging.getLogger(__name__)


def load_with_transformers(
    settings: ModelServerSettings, folder: Path, no_row: NoRow, device: torch.device
) -> LoadedShard:
    """Load a model that no row of the table describes."""
    refuse_stages(settings, f"models that run through transformers ({no_row.why})")
    # transformers' models: seconds to import, not wanted for those of the table
    from funitel.model_server.loading.transformers import load_fallback

    codec = TextCodec(folder)
    eos_token_ids = find_eos(folder, codec)
    dtype = choose_dtype(settings.dtype, device)
    model = load_fallback(settings, folder, no_row, dtype, device, lambda: join_ranks(settings, device))
    if settings.speculate:
        message = "--speculate %d changes nothing: %s runs through transformers"
        logger.warning(message, settings.speculate, model.architecture)
    settings = replace(
        settings,
        speculate=0,
        block_size=model.pools.block_size,
        prefill_chunking=settings.prefill_chunking and model.takes_chunks,
        prefix_caching=settings.prefix_caching and model.shares_prefixes,
    )
    return make_executor(settings, folder, model, model.loaded, model.pools, codec, device, eos_token_ids)


def asked_for_transformers(settings: ModelServerSettings, folder: Path) -> NoRow:
    """The reason to have transformers compute a model that has a row, or none.

    Raises:
        StartupError: the model is a GGUF, or described by a file.
    """
    if settings.model_spec is not None:
        raise SettingsError(f"--model-spec {settings.model_spec} is not for --engine transformers")
    refuse_gguf(folder, TRANSFORMERS)
    return NoRow("--engine transformers", why="--engine transformers")
