"""The fused step against torch on specs that no family has: in odd sizes and company, on several ranks."""

from dataclasses import replace

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.cpu import build as building
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.spec.model_spec import (
    Activation,
    ModelSpec,
    Norm,
    NormPlacement,
    Position,
    QkNorm,
    QkvLayout,
    RotaryScaling,
    RotarySpec,
)
from funitel.model_server.spec.tensor_names import TensorNames
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_library, step_through
from funitel_testing.random_weights import RandomWeights
from funitel_testing.threads import on_ranks

pytestmark = pytest.mark.skipif("avx2" not in building.cpu_flags(), reason="needs AVX2")

SIZES = {"vocab_size": 51, "hidden_size": 45, "num_layers": 2, "intermediate_size": 37, "max_position_embeddings": 128}
PLAIN = ModelSpec(architecture="Test", num_heads=6, num_kv_heads=3, head_dim=22, **SIZES)
AFTER = {"attention_post_norm": "layers.{i}.after", "mlp_post_norm": "layers.{i}.last"}
SPECS = {
    "norms after the sum, no positions": replace(
        PLAIN,
        norm=Norm.LAYER,
        has_norm_bias=True,
        norm_placement=NormPlacement.AFTER,
        residual_scale=0.7,
        position=Position.NONE,
        is_gated=False,
        activation=Activation.QUICK_GELU,
        names=TensorNames(**AFTER, final_norm=""),
    ),
    "a parallel block that is scaled": replace(
        PLAIN,
        has_norm_bias=True,
        norm_offset=1.0,
        is_parallel=True,
        residual_scale=0.5,
        activation=Activation.RELU_SQUARED,
        rotary=RotarySpec(dims=6, is_interleaved=True),
        qk_norm=QkNorm.HEAD,
        has_qk_norm_bias=True,
        attention_softcap=2.0,
    ),
    "slopes under a cap within windows": replace(
        PLAIN,
        norm=Norm.LAYER,
        norm_placement=NormPlacement.POST,
        position=Position.ALIBI,
        alibi_scale=0.5,
        attention_softcap=3.0,
        sliding_windows=(7, None),
        qk_norm=QkNorm.EACH,
        has_qk_norm_bias=True,
        logit_scale=0.3,
        logit_softcap=2.0,
        names=TensorNames(**AFTER),
    ),
    "rows of heads normalised, clipped, scaled by layer": replace(
        PLAIN,
        norm_placement=NormPlacement.BOTH,
        position=Position.LEARNED,
        position_offset=3,
        qk_norm=QkNorm.WHOLE,
        has_qk_norm_bias=True,
        qkv_clip=0.5,
        is_scaled_by_layer=True,
        embedding_scale=3.0,
        is_tied=True,
        has_head_bias=True,
        names=TensorNames(**AFTER, positions="positions", embedding_norm="entrance"),
    ),
    "two kinds of turns, and layers without": replace(
        PLAIN,
        num_layers=3,
        has_norm_weight=False,
        rotary=RotarySpec(dims=10, scaling=RotaryScaling(kind="yarn", factor=4.0, amplitude=1.3)),
        window_rotary=RotarySpec(base=500.0, is_interleaved=True),
        sliding_windows=(None, 9, None),
        unrotated_layers=(2,),
        qkv_layout=QkvLayout.GROUPED,
        attention_scale=0.4,
        names=TensorNames(qkv="layers.{i}.qkv", is_transposed=True),
    ),
}


def logits_of(spec: ModelSpec, parallel: TensorParallel, tier: Tier | None) -> torch.Tensor:
    decoder: Forward
    if tier is None:
        decoder = Decoder(spec, RandomWeights(), parallel, TorchAttention(BLOCK_SIZE, CPU))
    else:
        sizes = {"block_size": BLOCK_SIZE, "num_threads": 1}
        decoder = FusedDecoder(spec, RandomWeights(), parallel, fused_library(), tier=tier, **sizes)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    pool = KVCache(spec, heads, 60, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, spec.vocab_size, (n,), generator=generator).tolist() for n in (30, 4, 17)]
    return torch.cat(step_through(decoder, pool, prompts, 3))


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_torch_on_any_number_of_ranks(name: str) -> None:
    spec = SPECS[name]
    assert missing(spec) is None
    expected = logits_of(spec, TensorParallel(), None)
    assert expected.std() > 0.1
    for size in (1, 2, 4):
        found = on_ranks(size, lambda parallel: logits_of(spec, parallel, Tier.FLOAT32))
        assert ((found - expected).norm() / expected.norm()).item() < 1e-5, size
