"""Checkpoint folder -> loaded encoder-decoder."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from funitel.model_server.media.families.whisper import open_whisper
from funitel.model_server.models.encoder_decoder.model import Seq2Seq
from funitel.model_server.models.weight_offload import refuse_host_memory
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.registry.encoder_decoders import seq2seq_spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.step import Capability

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
    weights = Weights(folder, choose_dtype(settings.dtype, device), device, spec.decoder.names.prefix)
    check_flag(settings.quantize, weights.quantization)
    codec = TextCodec(folder)
    eos_token_ids = find_eos(folder, codec)
    parallel = join_ranks(settings, device)
    media = open_whisper(settings, spec, weights) if spec.hears else None
    rules: RowRules = Seq2SeqRules.read(folder, spec) if media is None else TranscriptionRules.read(folder, spec, media)
    num_opening = NUM_OPENING_TOKENS if media is None else 0  # the prompt has the opening
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
