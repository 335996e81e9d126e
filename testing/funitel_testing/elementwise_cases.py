"""Random cases for what lies between matrix products: shapes, norms and heads, each drawn from a seed."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import ElementwiseOps, HeadRule
from funitel.model_server.layers.linear import HeadNorm, NormLayer
from funitel.model_server.layers.rotary import Rotary, Rotation
from funitel.model_server.spec.model_spec import ModelSpec, Norm, QkNorm, RotarySpec
from funitel_testing.random_weights import RandomWeights

CPU = torch.device("cpu")
# Relative errors that kernels are held to; float32 sums whatever the inputs.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCK_SIZE = 4
PLAIN = ModelSpec(
    architecture="test",
    vocab_size=1,
    hidden_size=1,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    intermediate_size=1,
    max_position_embeddings=10_000,
)


@dataclass(frozen=True)
class Join:
    """A residual and a result, and the norms of both; either may be none."""

    x: torch.Tensor
    result: torch.Tensor
    after: NormLayer | None
    scale: float
    before: NormLayer | None

    def through(self, elementwise: ElementwiseOps) -> list[torch.Tensor]:
        """What the operations make of them."""
        normed = [] if self.before is None else [elementwise.norm(self.before, self.x)]
        return [*normed, *elementwise.join(self.x, self.result, self.after, self.scale, self.before)]

    def exact(self) -> "Join":
        """The same numbers as float32."""
        return Join(self.x.float(), self.result.float(), _exact(self.after), self.scale, _exact(self.before))


@dataclass(frozen=True)
class Placing:
    """Heads of some tokens on their way to the pool; the last token is padding in block 0."""

    qkv: torch.Tensor
    rule: HeadRule
    rotation: Rotation | None
    spec: ModelSpec
    kv_dtype: torch.dtype

    def through(self, elementwise: ElementwiseOps) -> list[torch.Tensor]:
        """Queries, and the pool."""
        num_tokens, device = len(self.qkv), self.qkv.device
        num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
        heads = HeadSplit(0, self.rule.num_heads, 0, self.rule.num_kv_heads)
        cache = KVCache(self.spec, heads, num_blocks, BLOCK_SIZE, self.kv_dtype, device)
        places = torch.from_numpy(np.random.default_rng(num_tokens).permutation(num_tokens)).to(device)
        blocks, offsets = 1 + places // BLOCK_SIZE, places % BLOCK_SIZE
        blocks[-1] = offsets[-1] = 0
        return [elementwise.place(self.qkv, self.rule, self.rotation, cache, 1, (blocks, offsets)), cache.pool]

    def exact(self) -> "Placing":
        """The same numbers as float32."""
        norms = self.rule.norms
        rule = replace(self.rule, norms=norms and (_exact(norms[0]), _exact(norms[1])))
        rotation = self.rotation and replace(
            self.rotation, cos=self.rotation.cos.float(), sin=self.rotation.sin.float()
        )
        return Placing(self.qkv.float(), rule, rotation, self.spec, torch.float32)


def draw_join(seed: int, device: torch.device) -> Join:
    """A case of its own for each seed."""
    random = np.random.default_rng(seed)
    dtype = list(BOUNDS)[seed % 3]
    size = int(random.choice([16, 48, 100, 576, 2048]))
    weights = RandomWeights(dtype, device)

    def norm(name: str) -> NormLayer | None:
        spec = replace(
            PLAIN,
            norm=Norm(random.choice(["rms", "rms", "layer", "none"])),
            norm_offset=float(random.integers(0, 2)),
            has_norm_weight=bool(random.random() < 0.8),
            has_norm_bias=bool(random.random() < 0.5),
        )
        return NormLayer(spec, weights, f"{name}{seed}", size) if random.random() < 0.8 else None

    x, result = _drawn((2, int(random.integers(1, 6)), size), seed, dtype, device)
    return Join(x, result, norm("after"), float(random.choice([1.0, 0.22])), norm("before"))


def draw_placing(seed: int, device: torch.device) -> Placing:
    """A case of its own for each seed."""
    random = np.random.default_rng(seed)
    dtype = list(BOUNDS)[seed % 3]
    num_kv_heads, group = int(random.integers(1, 4)), int(random.choice([1, 2, 3, 7]))
    head_dim = int(random.choice([8, 16, 64, 80, 96, 128, 256]))
    spec = replace(
        PLAIN,
        head_dim=head_dim,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        norm=Norm(random.choice(["rms", "layer"])),
        norm_offset=float(random.integers(0, 2)),
        qk_norm=QkNorm(random.choice(["none", "head", "each"])),
        has_qk_norm_bias=bool(random.random() < 0.3),
    )
    num_tokens = int(random.integers(1, 7))
    rotation = None
    if random.random() < 0.85:
        dims = int(random.choice([head_dim, head_dim // 4 * 2, head_dim // 8 * 2]))
        rotary = Rotary(RotarySpec(dims=dims, is_interleaved=bool(random.random() < 0.4)), head_dim, device)
        rotation = rotary.rotation(torch.from_numpy(random.integers(0, 5000, num_tokens)).to(device), None, dtype)
    weights, norms = RandomWeights(dtype, device), None
    if spec.qk_norm is not QkNorm.NONE:
        norms = tuple(
            HeadNorm(spec, weights, f"{name}{seed}", count, (0, count), TensorParallel(), 1)
            for name, count in (("q", spec.num_heads), ("k", num_kv_heads))
        )
    clip = float(random.uniform(0.5, 2)) if random.random() < 0.2 else None
    qkv = _drawn((num_tokens, spec.num_heads + 2 * num_kv_heads, head_dim), seed, dtype, device)
    scales = (3e-3, 0.7) if random.random() < 0.3 else (1.0, 1.0)
    rule = HeadRule(spec.num_heads, num_kv_heads, clip, norms, *scales)  # type: ignore[arg-type]
    return Placing(qkv, rule, rotation, spec, dtype)


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst relative error, infinite where any number is none."""
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm()) if a.float().isfinite().all() else float("inf")
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors)


def _drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _exact(norm: Any) -> Any:
    if norm is None:
        return None
    exact = copy.copy(norm)
    exact.weight = None if norm.weight is None else norm.weight.float()
    exact.bias = None if norm.bias is None else norm.bias.float()
    return exact
