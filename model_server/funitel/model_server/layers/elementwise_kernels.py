"""Triton kernels for what lies between a layer's matrix products: each reads and writes its tensors once.

Sums and products are float32 whatever the tensors are. No launch depends on what tensors hold, only on their shapes: a
CUDA graph may replay it.
"""

import torch
import triton
import triton.language as tl

from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.layers.elementwise import HeadRule, TorchElementwiseOps
from funitel.model_server.layers.linear import HeadNorm, NormLayer
from funitel.model_server.layers.rotary import Rotation
from funitel.model_server.spec.model_spec import Activation, Norm, QkNorm

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_TWO_BY_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def join_residual(
    x,
    result,
    total,
    normed,
    after_weight,
    before_weight,
    after_bias,
    before_bias,
    scale,
    after_eps,
    before_eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESULT: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_AFTER_WEIGHT: tl.constexpr,
    HAS_BEFORE_WEIGHT: tl.constexpr,
    HAS_AFTER_BIAS: tl.constexpr,
    HAS_BEFORE_BIAS: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token: total = x + scale * after(result), normed = before(total). Without a result normed = before(x).

    With LOADS_FIRST tensors of norms are loaded before the program waits for the kernel before it.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    dims = tl.arange(0, PADDED)
    is_in = dims < SIZE
    if LOADS_FIRST:
        after_factors = _loaded(after_weight, dims, is_in, 1.0, AFTER != "none" and HAS_AFTER_WEIGHT)
        after_terms = _loaded(after_bias, dims, is_in, 0.0, AFTER != "none" and HAS_AFTER_BIAS)
        before_factors = _loaded(before_weight, dims, is_in, 1.0, BEFORE != "none" and HAS_BEFORE_WEIGHT)
        before_terms = _loaded(before_bias, dims, is_in, 0.0, BEFORE != "none" and HAS_BEFORE_BIAS)
    wait_for_previous(IS_DEPENDENT)
    row = tl.load(x + first + dims, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESULT:
        added = tl.load(result + first + dims, mask=is_in, other=0.0).to(tl.float32)
        if not LOADS_FIRST:
            after_factors = _loaded(after_weight, dims, is_in, 1.0, AFTER != "none" and HAS_AFTER_WEIGHT)
            after_terms = _loaded(after_bias, dims, is_in, 0.0, AFTER != "none" and HAS_AFTER_BIAS)
        added = _normalized(added, is_in, after_factors, after_terms, after_eps, SIZE, AFTER)
        rounded = (row + scale * added).to(total.dtype.element_ty)
        tl.store(total + first + dims, rounded, mask=is_in)
        row = rounded.to(tl.float32)
    if BEFORE != "none":
        if not LOADS_FIRST:
            before_factors = _loaded(before_weight, dims, is_in, 1.0, HAS_BEFORE_WEIGHT)
            before_terms = _loaded(before_bias, dims, is_in, 0.0, HAS_BEFORE_BIAS)
        row = _normalized(row, is_in, before_factors, before_terms, before_eps, SIZE, BEFORE)
        tl.store(normed + first + dims, row.to(normed.dtype.element_ty), mask=is_in)


@triton.jit
def _loaded(tensor, dims, is_in, otherwise, IS_THERE: tl.constexpr):
    """A tensor of a norm, or one number for each element where there is none."""
    if IS_THERE:
        return tl.load(tensor + dims, mask=is_in, other=0.0).to(tl.float32)
    else:
        return tl.zeros(dims.shape, tl.float32) + otherwise


@triton.jit
def _normalized(row, is_in, factors, terms, eps, SIZE: tl.constexpr, KIND: tl.constexpr):
    """A row, zeros beyond its elements, by a norm of KIND."""
    if KIND == "layer":
        row = tl.where(is_in, row - tl.sum(row, 0) / SIZE, 0.0)
    if KIND != "none":
        row = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps) * factors + terms
    return row


@triton.jit
def gate_units(x, out, num_units, ACTIVATION: tl.constexpr, NUM_AT_ONCE: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """Some units of one token: its gates come first, then as many values."""
    wait_for_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * NUM_AT_ONCE + tl.arange(0, NUM_AT_ONCE)
    is_in = units < num_units
    line = x + token * 2 * num_units
    gate = tl.load(line + units, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(line + num_units + units, mask=is_in, other=0.0).to(tl.float32)
    product = activated(gate, ACTIVATION) * up
    tl.store(out + token * num_units + units, product.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """By the names of `spec.Activation`."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid((x + 0.044715 * x * x * x) * _TWICE_SQRT_TWO_BY_PI)  # (1 + tanh y) / 2 = sigmoid(2 y)
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


@triton.jit
def place_heads(
    qkv,
    queries,
    keys,
    values,
    blocks,
    offsets,
    cos,
    sin,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    clip,
    eps,
    key_scale,
    value_scale,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    MOST: tl.constexpr,
    NORM: tl.constexpr,
    IS_NORM_OF_EACH: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some heads of one token: queries and keys normalised and turned, keys and values written to the token's slot.

    The first 2 * HALF elements of a head turn, each with its partner, which is loaded beside it. What goes to the pool
    is kept within +- MOST, if that is not 0.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dims = tl.arange(0, PADDED_DIM)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    is_query = (head < NUM_HEADS)[:, None]
    is_turning = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_in = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    if HALF > 0:
        if IS_INTERLEAVED:
            partner, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            partner, pair, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims < HALF
        angle = token * HALF + pair
        is_pair = dims < 2 * HALF
        c = tl.load(cos + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    block, offset = tl.load(blocks + token), tl.load(offsets + token)
    wait_for_previous(IS_DEPENDENT)
    heads = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM
    x = tl.load(heads + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
    if HAS_CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    mean = tl.zeros([HEADS_AT_ONCE], tl.float32)
    factor = tl.full([HEADS_AT_ONCE], 1.0, tl.float32)
    if NORM != "none":
        if NORM == "layer":
            mean = tl.sum(x, 1) / HEAD_DIM
        centred = tl.where(is_in, x - mean[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 1) / HEAD_DIM + eps)
    place = tl.where(head < NUM_HEADS, head, kv_head)[:, None] * HEAD_DIM if IS_NORM_OF_EACH else 0
    if NORM != "none":
        normed = _of_heads(
            x, mean, factor, place + dims[None, :], is_query, is_in, q_weight, k_weight, q_bias, k_bias, HAS_NORM_BIAS
        )
        x = tl.where(is_turning, normed, x)
    if HALF > 0:
        does_turn = is_in & is_turning & (dims < 2 * HALF)[None, :]
        other = tl.load(heads + partner[None, :], mask=does_turn, other=0.0).to(tl.float32)
        if HAS_CLIP:
            other = tl.minimum(tl.maximum(other, -clip), clip)
        if NORM != "none":
            other = _of_heads(
                other,
                mean,
                factor,
                place + partner[None, :],
                is_query,
                does_turn,
                q_weight,
                k_weight,
                q_bias,
                k_bias,
                HAS_NORM_BIAS,
            )
        x = tl.where(does_turn, x * c + other * tl.where(is_first[None, :], -s, s), x)
    own = queries + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(own, x.to(queries.dtype.element_ty), mask=is_in & is_query)
    if HAS_SCALES:
        x = x / tl.where(is_turning, key_scale, value_scale)
    if MOST > 0:
        x = tl.minimum(tl.maximum(x, -MOST), MOST)
    key = keys + block * key_block_stride + offset * key_slot_stride + kv_head[:, None] * key_head_stride
    tl.store(key + dims[None, :], x.to(keys.dtype.element_ty), mask=is_in & is_turning & (head >= NUM_HEADS)[:, None])
    value = values + block * value_block_stride + offset * value_slot_stride + kv_head[:, None] * value_head_stride
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    tl.store(value + dims[None, :], x.to(values.dtype.element_ty), mask=is_in & is_value)


@triton.jit
def _of_heads(x, mean, factor, places, is_query, is_in, q_weight, k_weight, q_bias, k_bias, HAS_BIAS: tl.constexpr):
    """Elements of query and key heads by their norm; `places` are those of the elements in its weights."""
    is_key = is_in & (is_query == 0)
    weight = tl.load(q_weight + places, mask=is_in & is_query, other=0.0).to(tl.float32)
    weight += tl.load(k_weight + places, mask=is_key, other=0.0).to(tl.float32)
    x = (x - mean[:, None]) * factor[:, None] * weight
    if HAS_BIAS:
        x += tl.load(q_bias + places, mask=is_in & is_query, other=0.0).to(tl.float32)
        x += tl.load(k_bias + places, mask=is_key, other=0.0).to(tl.float32)
    return x


_MAX_HIDDEN = 16_384  # elements of a row of hidden states: a program holds a row in its registers
_MAX_LOADED_FIRST = 8192  # elements of a row beside which its norms' tensors fit into registers too
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
            x, out, num_units, ACTIVATION=activation.value, NUM_AT_ONCE=_UNITS_AT_ONCE, **dependent()
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
            IS_NORM_OF_EACH=q_norm is not None and q_norm.weight is not None and q_norm.weight.dim() == 2,
            HAS_NORM_BIAS=q_norm is not None and q_norm.bias is not None,
            **dependent(),
        )
        return queries


def _has(x: torch.Tensor, *norms: NormLayer | None) -> bool:
    """Whether `_join` has these norms of hidden states."""
    return x.shape[-1] <= _MAX_HIDDEN and all(norm is None or norm.dtype is None for norm in norms)


def _places(qkv: torch.Tensor, rule: HeadRule) -> bool:
    """Whether `place_heads` has these heads: a norm over all of them is one over other ranks too.

    Norms have weights, are not of values, and come before the rotation; there are queries, keys and values.
    """
    if not rule.num_kv_heads or rule.has_key_values or rule.value_eps is not None:
        return False
    is_by_head = rule.norms is None or (
        rule.norms[0].kind not in (QkNorm.WHOLE, QkNorm.PLAIN) and not rule.is_norm_last
    )
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
        LOADS_FIRST=size <= _MAX_LOADED_FIRST,
        num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        **dependent(),
    )
