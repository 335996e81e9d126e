"""Elementwise operations in Triton, between the matrix products of a layer: one kernel each where it has the case."""

import torch
import triton

from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.layers.elementwise import HeadRule, TorchElementwiseOps
from funitel.model_server.layers.elementwise_kernels import gate_units, join_residual, place_heads
from funitel.model_server.layers.linear import HeadNorm, NormLayer
from funitel.model_server.layers.rotary import Rotation
from funitel.model_server.spec.model_spec import Activation, Norm, QkNorm

_MAX_HIDDEN = 16_384  # elements of a row of hidden states: a program holds a row in its registers
_MAX_HEAD_DIM = 256
_UNITS_AT_ONCE = 1024
_HEAD_ELEMENTS = 1024  # of a program's heads


class TritonElementwiseOps:
    """Sums in float32 whatever the inputs are. What a kernel does not have is computed by the reference.

    `kv_dtype` is the precision of the pool, the inputs' or a float8.
    """

    name = "triton"

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self._kv_dtype = kv_dtype
        self._reference = TorchElementwiseOps()

    def norm(self, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
        """See ElementwiseOps."""
        if norm.kind is Norm.NONE or not _has(x, norm):
            return self._reference.norm(norm, x)
        normed = torch.empty_like(x)
        _join(x, None, None, normed, None, 1.0, norm)
        return normed

    def join(
        self, x: torch.Tensor, result: torch.Tensor, after: NormLayer | None, scale: float, before: NormLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ElementwiseOps."""
        if not _has(x, after, before):
            return self._reference.join(x, result, after, scale, before)
        total = torch.empty_like(x)
        normed = total if before is None or before.kind is Norm.NONE else torch.empty_like(x)
        _join(x, result, total, normed, after, scale, before)
        return total, normed

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See ElementwiseOps."""
        assert x.is_contiguous()
        num_tokens, num_units = x.shape[0], x.shape[1] // 2
        out = x.new_empty(num_tokens, num_units)
        gate_units[(num_tokens, triton.cdiv(num_units, _UNITS_AT_ONCE))](
            x, out, num_units, ACTIVATION=activation.value, NUM_AT_ONCE=_UNITS_AT_ONCE
        )
        return out

    def place(
        self, qkv: torch.Tensor, rule: HeadRule, rotation: Rotation | None, cache: KVCache, layer: int, slots: Slots
    ) -> torch.Tensor:
        """See ElementwiseOps."""
        keys, values = cache.keys[layer], cache.values[layer]
        if keys.dtype is not self._kv_dtype or not _places(qkv, rule):
            return self._reference.place(qkv, rule, rotation, cache, layer, slots)
        assert qkv.is_contiguous()
        num_tokens, num_heads, dim = qkv.shape
        queries = qkv.new_empty(num_tokens, rule.num_heads, dim)
        q_norm, k_norm = rule.norms or (None, None)
        padded = triton.next_power_of_2(dim)
        at_once = max(1, _HEAD_ELEMENTS // padded)
        place_heads[(num_tokens, triton.cdiv(num_heads, at_once))](
            qkv,
            queries,
            keys,
            values,
            *slots,
            qkv if rotation is None else rotation.cos,
            qkv if rotation is None else rotation.sin,
            qkv if q_norm is None else q_norm.weight,
            qkv if k_norm is None else k_norm.weight,
            qkv if q_norm is None or q_norm.bias is None else q_norm.bias,
            qkv if k_norm is None or k_norm.bias is None else k_norm.bias,
            0.0 if rule.clip is None else rule.clip,
            0.0 if q_norm is None else q_norm.eps,
            rule.key_scale,
            rule.value_scale,
            *keys.stride()[:3],
            *values.stride()[:3],
            NUM_HEADS=rule.num_heads,
            NUM_KV_HEADS=rule.num_kv_heads,
            HEAD_DIM=dim,
            PADDED_DIM=padded,
            HALF=0 if rotation is None else rotation.cos.shape[-1],
            HEADS_AT_ONCE=at_once,
            IS_INTERLEAVED=rotation is not None and rotation.is_interleaved,
            HAS_CLIP=rule.clip is not None,
            HAS_SCALES=rule.is_scaled,
            MOST=torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0,
            NORM=_kind_of(q_norm),
            IS_NORM_OF_EACH=q_norm is not None and q_norm.weight.dim() == 2,
            HAS_NORM_BIAS=q_norm is not None and q_norm.bias is not None,
        )
        return queries


def _has(x: torch.Tensor, *norms: NormLayer | None) -> bool:
    """Whether `_join` has these norms of hidden states."""
    return x.shape[-1] <= _MAX_HIDDEN and all(norm is None or norm.dtype is None for norm in norms)


def _places(qkv: torch.Tensor, rule: HeadRule) -> bool:
    """Whether `place_heads` has these heads: a norm over all of them is one over other ranks too."""
    is_by_head = rule.norms is None or rule.norms[0].kind is not QkNorm.WHOLE
    return is_by_head and qkv.shape[-1] <= _MAX_HEAD_DIM


def _kind_of(norm: NormLayer | HeadNorm | None) -> str:
    """What kernels call the kind of a norm."""
    if norm is None:
        return Norm.NONE.value
    return (norm.norm if isinstance(norm, HeadNorm) else norm.kind).value


def _join(
    x: torch.Tensor,
    result: torch.Tensor | None,
    total: torch.Tensor | None,
    normed: torch.Tensor,
    after: NormLayer | None,
    scale: float,
    before: NormLayer | None,
) -> None:
    assert x.is_contiguous()
    assert result is None or result.is_contiguous()
    num_tokens, size = x.shape
    weights = [None if norm is None else norm.weight for norm in (after, before)]
    biases = [None if norm is None else norm.bias for norm in (after, before)]
    join_residual[(num_tokens,)](
        x,
        x if result is None else result,
        x if total is None else total,
        normed,
        *(x if tensor is None else tensor for tensor in (*weights, *biases)),
        scale,
        0.0 if after is None else after.eps,
        0.0 if before is None else before.eps,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        HAS_RESULT=result is not None,
        AFTER=_kind_of(after),
        BEFORE=_kind_of(before),
        HAS_AFTER_WEIGHT=weights[0] is not None,
        HAS_BEFORE_WEIGHT=weights[1] is not None,
        HAS_AFTER_BIAS=biases[0] is not None,
        HAS_BEFORE_BIAS=biases[1] is not None,
        num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
    )
