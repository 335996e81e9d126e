"""Estimate what serving an encoder-decoder takes, computed by what its loader would choose."""

from dataclasses import replace
from pathlib import Path

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.kv_cache.precision import kv_label
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.media.families.whisper import WhisperEncoder
from funitel.model_server.models.encoder_decoder.model import Seq2Seq
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.spec.encoder_decoder import Seq2SeqSpec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.models.needs import Needs, with_memory

_META = torch.device("meta")


def estimate_seq2seq(settings: ModelsSettings, folder: Path, spec: Seq2SeqSpec) -> Needs:
    """What each rank of the encoder-decoder takes. Raises: `StartupError`."""
    device = choose_device(settings.device, 0)
    dtype, size = choose_dtype(settings.dtype, device), settings.num_shard
    checkpoint = Weights(folder, dtype, _META, spec.decoder.names.prefix, is_shown=False)
    check_flag(settings.quantize, checkpoint.quantization)

    def build(weights: Weights, parallel: TensorParallel) -> ModelSpec:
        if spec.hears:
            WhisperEncoder(spec, weights)
        return replace(spec.decoder, is_tied=Seq2Seq(spec, weights, parallel).is_tied)

    def held(rank: int) -> int:
        return torch_weight_bytes(spec.decoder, rank, size, dtype, device, build, checkpoint)

    heads = [HeadSplit.of(spec.decoder.num_heads, spec.decoder.num_kv_heads, size, rank) for rank in range(size)]
    facts = Needs(
        architecture=spec.decoder.architecture,
        served_by="torch, as an encoder-decoder",
        precision=kv_label(dtype),
        kv_precision=kv_label(dtype),
        context=spec.whole.max_position_embeddings,
        weights=tuple(map(held, range(size))),
    )
    return with_memory(facts, settings, [SpecPools(spec.whole, h, settings.block_size, dtype, device) for h in heads])
