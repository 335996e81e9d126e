"""Estimate what serving a decoder takes, computed by what the loaders would choose."""

from collections.abc import Sequence
from pathlib import Path

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.decoder import KV_DTYPES
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import MADE, ActivationDtype, Tier, asked_kv_kind, choose_tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.kv_cache.precision import KvDtype, kv_label, torch_kv_dtype
from funitel.model_server.kv_cache.state_pool import StateLayout
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.models.footprint import SizedProducts, torch_weight_bytes
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.quantized.select import MADE as MADE_ON_GPU
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.models.needs import Needs

_META = torch.device("meta")


def estimate_alone(
    settings: ModelsSettings, folder: Path, spec: ModelSpec, *, reads_middle: bool = False
) -> tuple[Needs, Sequence[Pools]]:
    """What each rank of a decoder takes, and its pools; `reads_middle`: a drafter reads outputs of all layers."""
    device = choose_device(settings.device, 0)
    ranks = [TensorParallel(rank, settings.num_shard, _META) for rank in range(settings.num_shard)]
    heads = [HeadSplit.of(spec.num_heads, spec.num_kv_heads, rank.size, rank.rank) for rank in ranks]
    weights = Weights(folder, choose_dtype(settings.dtype, device), _META, spec.names.prefix, is_shown=False)
    tier = None
    weights.round_as(settings.quantize, None, spec.names)
    if device.type == "cpu":
        tier = choose_tier(settings.dtype, settings.quantize, weights.quantization, has_blocks=weights.has_blocks)
    is_made = device.type == "cuda" and weights.quantization is None and settings.quantize in MADE_ON_GPU
    if weights.quantization is not None or (not is_made and (tier is None or settings.quantize not in MADE)):
        check_flag(settings.quantize, weights.quantization)
    if device.type == "cuda" and (weights.quantization is not None or is_made):
        weights.products = SizedProducts(MADE_ON_GPU[settings.quantize or ""] if is_made else None)
    reason = f"the fused step is for CPUs, not {device.type}" if tier is None else missing(spec)
    if reads_middle:
        reason = "the drafter reads hidden states that the fused step does not keep"
    if tier is not None and reason is None:
        held = [weight_bytes(spec, rank, tier, weights.block_type, weights.num_outliers) for rank in ranks]
        asked, size = settings.kv_cache_dtype, settings.block_size
        usual = tier.kv_kind(spec, size, ActivationDtype.INT8)
        kv_dtype: KvDtype = KV_DTYPES[usual if asked is None else asked_kv_kind(spec, size, asked)]
        blocks = weights.block_format or "the GGUF's blocks"
        served_by, precision = "the fused C++ step", blocks if tier is Tier.GGUF else tier.label
    else:
        dtype = weights.dtype
        kv_dtype = torch_kv_dtype(settings.kv_cache_dtype, dtype)
        held = [torch_weight_bytes(spec, each.rank, each.size, dtype, device, checkpoint=weights) for each in ranks]
        served_by, precision = "torch", kv_label(dtype)
    facts = Needs(
        architecture=spec.architecture,
        served_by=served_by,
        why=reason or "",
        precision=precision,
        kv_precision=kv_label(kv_dtype),
        context=spec.max_position_embeddings,
        weights=tuple(held),
    )
    layouts = [StateLayout.of(spec, rank.size, rank.rank) for rank in ranks]
    pools = [
        SpecPools(spec, each, settings.block_size, kv_dtype, device, layout)
        for each, layout in zip(heads, layouts, strict=True)
    ]
    return facts, pools
