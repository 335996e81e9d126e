"""Models in parts, for tests: by hand from what computes each part, and by the loaders with a part in torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.stages import Handover
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.joined_pools import JoinedCache, JoinedPools
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.loading import parts as loading
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.joined import JoinedForward, JoinedPart
from funitel.model_server.models.stage_boundary import StageBoundary
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec, stages_of
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder

NUM_BLOCKS = 200


def join_by_hand(
    folder: Path, tiers: Sequence[Tier | None], layers: Sequence[int] | None = None
) -> tuple[JoinedForward, JoinedCache]:
    """The model of `folder` in as many parts as there are tiers, and its pools; torch computes where no tier is."""
    spec = choose_spec(None, folder)
    link, parts, pools = Handover(), [], []
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    for held, tier in zip(stages_of(spec, len(tiers), layers), tiers, strict=True):
        own = StageSpec.of(spec, held)
        decoder: Forward
        dtype = torch.float32
        if tier is None:
            weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
            boundary = StageBoundary(link, torch.float32, CPU)
            decoder = Decoder(own, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU), boundary=boundary)
        else:
            decoder = fused_decoder(folder, tier, TensorParallel(), part=lambda _, own=own: own, link=link)
            dtype = decoder.kv_dtype
        parts.append(JoinedPart(decoder, CPU))
        pools.append(SpecPools(own, heads, BLOCK_SIZE, dtype, CPU))
    return JoinedForward(parts), JoinedPools(tuple(pools)).make(NUM_BLOCKS)


def first_part_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loaders compute the first part of a model in torch, as they do on a GPU; in float32 on this CPU."""
    real = loading.load_fused

    def load(settings: Any, spec: ModelSpec, *given: Any, **named: Any) -> Any:
        return None if spec.is_first else real(settings, spec, *given, **named)

    monkeypatch.setattr(loading, "load_fused", load)
