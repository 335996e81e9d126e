"""Checkpoint folder -> loaded encoder-decoder."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import MADE
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.executor.row_rules import NUM_OPENING_TOKENS, RowRules, Seq2SeqRules, TranscriptionRules
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.loading.common import (
    choose_device,
    choose_dtype,
    find_eos,
    in_torch,
    join_ranks,
    refuse_stages,
    set_threads,
)
from funitel.model_server.loading.executor import LoadedShard, make_executor
from funitel.model_server.loading.flags import check_engine
from funitel.model_server.media.service import MediaService
from funitel.model_server.media.whisper import WhisperEncoder
from funitel.model_server.models.encoder_decoder.forced_tokens import read_rules
from funitel.model_server.models.encoder_decoder.model import Seq2Seq
from funitel.model_server.models.weight_offload import refuse_host_memory
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.registry.encoder_decoders import seq2seq_spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.step import Capability

DEFAULT_CACHE_GB, DEFAULT_GPU_CACHE_GB = 0.5, 2.0

logger = logging.getLogger(__name__)


def load_seq2seq(settings: ModelServerSettings, folder: Path) -> LoadedShard:
    """Load this rank's share of the encoder-decoder in `folder`; blocks until every rank has joined.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    refuse_stages(settings, "encoder-decoders")
    _check(settings)
    device = choose_device(settings.device, settings.device_number)
    set_threads(settings.num_threads or settings.most_threads)
    config = read_json(folder / "config.json")
    spec = seq2seq_spec_of(config)
    _, heads = (  # refuses too many ranks
        HeadSplit.of(stack.num_heads, stack.num_kv_heads, settings.world_size, settings.rank)
        for stack in (spec.encoder, spec.decoder)
    )
    decoding = read_rules(folder, spec.decoder.vocab_size, hears=spec.hears)
    if spec.is_multilingual and decoding.forced_first is None:
        logger.warning(
            "the checkpoint does not say which language completions are in (forced_bos_token_id of "
            "generation_config.json): that is up to the model, behind the token %d",
            decoding.start,
        )
    weights = Weights(folder, choose_dtype(settings.dtype, device), device, spec.decoder.names.prefix)
    check_flag(settings.quantize, weights.quantization)
    codec = TextCodec(folder)
    eos_token_ids = find_eos(folder, codec)
    parallel = join_ranks(settings, device)
    rules: RowRules = Seq2SeqRules(spec, decoding)
    media: MediaService | None = None
    num_opening = NUM_OPENING_TOKENS
    if spec.hears:
        # Its features lie in the pool as soon as a sequence runs: a few sounds that wait are all that is kept.
        encoder = WhisperEncoder(spec.encoder, config["num_mel_bins"], weights)
        media = MediaService(encoder, _cache_bytes(settings, device, encoder), device)
        rules, num_opening = TranscriptionRules(spec, decoding, media.features), 0  # the prompt has the opening
    # Timestamps are chosen by the host, behind each step.
    loaded = replace(in_torch(Seq2Seq(spec, weights, parallel), weights, parallel), takes_device_tokens=not spec.hears)
    pools = SpecPools(spec.whole, heads, settings.block_size, loaded.kv_dtype, device)
    make = partial(make_executor, settings, folder, spec.whole, loaded, pools, codec, device, eos_token_ids)
    executor, info = make(rules, media=media)
    info = replace(
        info,
        use_prefix_caching=False,  # what the pool holds of a token depends on the whole prompt
        num_opening_tokens=num_opening,
        capabilities=info.capabilities | ({Capability.FIRST_TOKEN} if spec.is_multilingual else frozenset()),
        speculate=num_opening,  # a router of TGI asks for no other place beyond prompt and completion
    )
    return executor, info


def _cache_bytes(settings: ModelServerSettings, device: torch.device, encoder: WhisperEncoder) -> int:
    """Bytes for the features of sounds. Raises SettingsError where they have no room for one."""
    default = DEFAULT_CACHE_GB if device.type == "cpu" else DEFAULT_GPU_CACHE_GB
    given = default if settings.media_cache_gb is None else settings.media_cache_gb
    least = encoder.num_features * encoder.feature_bytes
    if given * 2**30 < least:
        raise SettingsError(
            f"--media-cache-gb must have room for {least} bytes, the features of a sound, given {given}"
        )
    return int(given * 2**30)


def _check(settings: ModelServerSettings) -> None:
    """Raise SettingsError for what is for decoders only: the fused step, weights on the host, rotary positions."""
    check_engine(settings, "encoder-decoders")
    refuse_host_memory(settings, "encoder-decoders")
    if settings.kv_cache_dtype is not None:
        raise SettingsError(f"--kv-cache-dtype {settings.kv_cache_dtype} is not for encoder-decoders")
    if settings.quantize in MADE:
        raise SettingsError(f"--quantize {settings.quantize} is not for encoder-decoders: the fused CPU step makes it")
    for flag, value in (("--rope-scaling", settings.rope_scaling), ("--rope-factor", settings.rope_factor)):
        if value is not None:
            raise SettingsError(f"{flag} {value} is not for encoder-decoders: they have no rotary positions")
