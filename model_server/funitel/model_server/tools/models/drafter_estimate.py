"""Estimate what makes draft tokens beside a decoder, where that is built on its hidden states."""

from dataclasses import replace

import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.loading.common import choose_dtype
from funitel.model_server.loading.drafters import HeadPlan
from funitel.model_server.loading.torch_footprint import torch_weight_bytes
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.tables import VocabTables

_META, _CPU = torch.device("meta"), torch.device("cpu")


def drafting_of(settings: ModelsSettings) -> ModelServerSettings:
    """What a shard would be told of drafts."""
    return ModelServerSettings(
        model_id=settings.model_id,
        cache_dir=settings.cache_dir,
        block_size=settings.block_size,
        speculate=settings.speculate,
        draft_model=settings.draft_model,
    )


def head_needs(
    settings: ModelsSettings, spec: ModelSpec, plan: HeadPlan, *, is_shared: bool
) -> tuple[list[int], list[Pools | None]]:
    """Bytes of the weights and the pools of such a drafter on each rank.

    `is_shared`: it uses the embedding table, final norm and head that the target has in torch.
    """
    dtype = choose_dtype(settings.dtype, _CPU) if is_shared else torch.float32
    checkpoint = Weights(plan.folder, dtype, _META, plan.prefix, is_shown=False)

    def build(weights: Weights, parallel: TensorParallel) -> ModelSpec:
        tables = VocabTables.of(spec, None, weights, parallel)
        if is_shared:
            weights.held_bytes = 0
        plan.build(weights, tables, parallel, TorchAttention(1, _META))
        return replace(spec, is_tied=spec.is_tied and not is_shared)

    size, layer = settings.num_shard, plan.layer
    held = [torch_weight_bytes(spec, rank, size, dtype, _CPU, build, checkpoint) for rank in range(size)]
    if layer is None:
        return held, [None] * size
    heads = [HeadSplit.of(layer.num_heads, layer.num_kv_heads, size, rank) for rank in range(size)]
    return held, [SpecPools(layer, each, settings.block_size, dtype, _CPU) for each in heads]
