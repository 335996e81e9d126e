"""Triton kernels for what lies between a layer's matrix products: each reads and writes its tensors once.

Sums and products are float32 whatever the tensors are. No launch depends on what tensors hold, only on their shapes: a
CUDA graph may replay it.
"""

import triton
import triton.language as tl

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
):
    """One token: total = x + scale * after(result), normed = before(total). Without a result normed = before(x)."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    dims = tl.arange(0, PADDED)
    is_in = dims < SIZE
    row = tl.load(x + first + dims, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESULT:
        added = tl.load(result + first + dims, mask=is_in, other=0.0).to(tl.float32)
        added = _normalized(
            added, is_in, dims, after_weight, after_bias, after_eps, SIZE, AFTER, HAS_AFTER_WEIGHT, HAS_AFTER_BIAS
        )
        rounded = (row + scale * added).to(total.dtype.element_ty)
        tl.store(total + first + dims, rounded, mask=is_in)
        row = rounded.to(tl.float32)
    if BEFORE != "none":
        row = _normalized(
            row, is_in, dims, before_weight, before_bias, before_eps, SIZE, BEFORE, HAS_BEFORE_WEIGHT, HAS_BEFORE_BIAS
        )
        tl.store(normed + first + dims, row.to(normed.dtype.element_ty), mask=is_in)


@triton.jit
def _normalized(
    row,
    is_in,
    dims,
    weight,
    bias,
    eps,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A row, zeros beyond its elements, by a norm of KIND."""
    if KIND == "layer":
        row = tl.where(is_in, row - tl.sum(row, 0) / SIZE, 0.0)
    if KIND != "none":
        row = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)
        if HAS_WEIGHT:
            row = row * tl.load(weight + dims, mask=is_in, other=0.0).to(tl.float32)
        if HAS_BIAS:
            row = row + tl.load(bias + dims, mask=is_in, other=0.0).to(tl.float32)
    return row


@triton.jit
def gate_units(x, out, num_units, ACTIVATION: tl.constexpr, NUM_AT_ONCE: tl.constexpr):
    """Some units of one token: its gates come first, then as many values."""
    token = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * NUM_AT_ONCE + tl.arange(0, NUM_AT_ONCE)
    is_in = units < num_units
    line = x + token * 2 * num_units
    gate = tl.load(line + units, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(line + num_units + units, mask=is_in, other=0.0).to(tl.float32)
    product = _activated(gate, ACTIVATION) * up
    tl.store(out + token * num_units + units, product.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
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
        if IS_INTERLEAVED:
            partner, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            partner, pair, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims < HALF
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
        angle = token * HALF + pair
        is_pair = dims < 2 * HALF
        c = tl.load(cos + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        x = tl.where(does_turn, x * c + other * tl.where(is_first[None, :], -s, s), x)
    block, offset = tl.load(blocks + token), tl.load(offsets + token)
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
