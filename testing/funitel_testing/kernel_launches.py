"""Every Triton kernel, launched by name as serving launches it: what `compiled_kernels` compiles.

The tensors are on the CPU and their values mean nothing, as nothing is run. A new kernel, or a new way to compile one,
gets its row here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from funitel.model_server.adapters.peft_folder import AdapterTensors, LowRank
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site
from funitel.model_server.attention.triton_kernels import Tiles, attend, max_queries
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import AdapterGroup, RowSpan
from funitel.model_server.gpu_sampling.kernels import choose, penalise, warp
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import HeadRule
from funitel.model_server.layers.elementwise_kernels import TritonElementwiseOps
from funitel.model_server.layers.expert_ops import ExpertStack, HeldExperts
from funitel.model_server.layers.experts.choice_kernels import TritonChoice
from funitel.model_server.layers.experts.kernels import TritonExpertOps
from funitel.model_server.layers.linear import HeadNorm, NormLayer
from funitel.model_server.layers.low_rank.kernels import TritonLowRankOps
from funitel.model_server.layers.low_rank.weights import place
from funitel.model_server.layers.mlp import Router
from funitel.model_server.layers.rotary import Rotation
from funitel.model_server.layers.single_row_kernels import multiply as multiply_row
from funitel.model_server.layers.single_row_kernels import multiply_gated as multiply_gated_row
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.matmul_kernels import multiply, unpack
from funitel.model_server.quantized.packed_matrix import CodeKind, PackedMatrix
from funitel.model_server.spec.model_spec import Activation, ExpertScore, ExpertsSpec, ModelSpec, Norm, QkNorm
from funitel_testing.random_weights import RandomWeights

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call that launches kernels."""

    call: Callable[[], object]
    kernels: tuple[str, ...]  # that it launches
    archs: tuple[int, ...] = (80, 90)
    is_quick: bool = False  # compiled by default
    spilled_bytes: int = 0  # of a thread, at most: what is known of, and little beside what the kernel does


def _attention(
    head_dim: int,
    dtype: torch.dtype = BFLOAT16,
    *,
    is_decode: bool = False,
    num_parts: int = 1,
    group: int = 4,
    cached: torch.dtype | None = None,
    has_slopes: bool = False,
    has_sinks: bool = False,
    **rule: Any,
) -> None:
    num_kv_heads, block_size = 2, 16
    num_heads = num_kv_heads * group
    pool = torch.zeros(2, 2, block_size, num_kv_heads, head_dim, dtype=cached or dtype)
    query = torch.zeros(64, num_heads, head_dim, dtype=dtype)
    tokens = 1 if is_decode else max_queries(head_dim, dtype) // group
    numbers = torch.zeros(8, dtype=torch.int32)
    tiles = Tiles(tokens, num_parts, *[numbers] * 5, torch.zeros(8, 8, dtype=torch.int32))
    slopes = torch.zeros(num_heads) if has_slopes else None
    sinks = torch.zeros(num_heads, dtype=dtype) if has_sinks else None
    attend(query, pool[:, 0], pool[:, 1], torch.empty_like(query), tiles, scale=0.1, slopes=slopes, sinks=sinks, **rule)


_FEW_SPILLED = 32


def _spilled_bytes(head_dim: int) -> int:
    """Of a chunk's program on an A100, whose loop without masks and loop with them need the registers of both."""
    return 96 if 64 < head_dim <= 128 else _FEW_SPILLED


def _attention_launches() -> dict[str, Launch]:
    """Chunks and rows that decode, with whole and with cut keys, for every head size; then every rule."""
    whole, cut = ("_attend_tile",), ("_attend_tile", "_merge_parts")
    launches = {}
    for dim in (64, 96, 128, 256):
        for dtype in (BFLOAT16, FLOAT16, FLOAT32):
            name = f"{dim}-{str(dtype).removeprefix('torch.')}"
            launches |= {
                f"chunk-{name}": Launch(
                    call=partial(_attention, dim, dtype), kernels=whole, spilled_bytes=_spilled_bytes(dim)
                ),
                f"decode-{name}": Launch(
                    call=partial(_attention, dim, dtype, is_decode=True), kernels=whole, spilled_bytes=_FEW_SPILLED
                ),
                f"split-{name}": Launch(
                    call=partial(_attention, dim, dtype, is_decode=True, num_parts=8),
                    kernels=cut,
                    spilled_bytes=_FEW_SPILLED,
                    is_quick=dim == 128 and dtype is BFLOAT16,
                ),
            }
    rules: dict[str, dict[str, Any]] = {
        "window": {"window": 100},
        "softcap": {"softcap": 30.0},
        "window-softcap": {"window": 100, "softcap": 30.0},
        "slopes": {"has_slopes": True},
        "window-sinks": {"window": 100, "has_sinks": True},
        "all": {"window": 100, "softcap": 30.0, "has_slopes": True, "has_sinks": True},
    }
    for name, rule in rules.items():
        for dim in (64, 128, 256):
            call = partial(_attention, dim, **rule)
            launches[f"chunk-{dim}-{name}"] = Launch(
                call=call,
                kernels=whole,
                is_quick=name == "all" and dim == 128,
                spilled_bytes=_spilled_bytes(dim),
            )
            call = partial(_attention, dim, is_decode=True, num_parts=8, **rule)
            launches[f"split-{dim}-{name}"] = Launch(call=call, kernels=cut, spilled_bytes=_FEW_SPILLED)
    for dim in (64, 128, 256):
        call = partial(_attention, dim, cached=FLOAT8)
        launches[f"chunk-{dim}-float8"] = Launch(call=call, kernels=whole, archs=(90,))
        call = partial(_attention, dim, cached=FLOAT8, is_decode=True, num_parts=8)
        launches[f"split-{dim}-float8"] = Launch(call=call, kernels=cut, archs=(90,), spilled_bytes=_FEW_SPILLED)
    # Groups of their own: no sharing of KV heads (16 queries of a tile are padding), and one KV head for all.
    for group in (1, 71):
        call = partial(_attention, 64, is_decode=True, num_parts=2, group=group)
        launches[f"split-64-group{group}"] = Launch(call=call, kernels=cut)
    return launches


def _spec(**fields: Any) -> ModelSpec:
    sizes = {"vocab_size": 1, "num_layers": 1, "intermediate_size": 1, "max_position_embeddings": 1}
    return ModelSpec(**{"architecture": "", "hidden_size": 1, "num_heads": 8, "num_kv_heads": 2, **sizes, **fields})


def _join(size: int, dtype: torch.dtype, kind: Norm, *, has_after: bool) -> None:
    spec = _spec(head_dim=1, norm=kind, has_norm_bias=kind is Norm.LAYER)
    norm, x = NormLayer(spec, RandomWeights(dtype), "norm", size), torch.zeros(2, size, dtype=dtype)
    TritonElementwiseOps(dtype).norm(norm, x)
    TritonElementwiseOps(dtype).join(x, x, norm if has_after else None, 1.0, norm)


def _gate(dtype: torch.dtype, activation: Activation) -> None:
    TritonElementwiseOps(dtype).gate(torch.zeros(2, 2048, dtype=dtype), activation)


def _place(
    head_dim: int,
    dtype: torch.dtype,
    qk_norm: QkNorm,
    *,
    num_turned: int,
    is_interleaved: bool = False,
    cached: torch.dtype | None = None,
) -> None:
    spec = _spec(head_dim=head_dim, qk_norm=qk_norm)
    cache = KVCache(spec, HeadSplit(0, 8, 0, 2), 2, 16, cached or dtype, torch.device("cpu"))
    norms = None
    if qk_norm is not QkNorm.NONE:
        q, k = (HeadNorm(spec, RandomWeights(dtype), "", n, (0, n), TensorParallel(), 1) for n in (8, 2))
        norms = q, k
    table = torch.zeros(2, 1, num_turned // 2, dtype=dtype)
    slots = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rotation = Rotation(table, table, is_interleaved) if num_turned else None
    rule = HeadRule(8, 2, None if num_turned else 8.0, norms, 0.5 if cached else 1.0)
    TritonElementwiseOps(cached or dtype).place(
        torch.zeros(2, 12, head_dim, dtype=dtype), rule, rotation, cache, 0, slots
    )


def _glue_launches() -> dict[str, Launch]:
    """Rows from small to the longest, every activation, every way in which heads are placed."""
    launches = {}
    for size in (576, 4096, 16_384):
        for dtype in (BFLOAT16, FLOAT32):
            for kind in (Norm.RMS, Norm.LAYER):
                for has_after in (False, True):
                    name = f"join-{size}-{str(dtype).removeprefix('torch.')}-{kind}{'-after' * has_after}"
                    launches[name] = Launch(
                        call=partial(_join, size, dtype, kind, has_after=has_after),
                        kernels=("join_residual",) * 2,
                        spilled_bytes=64 if size == 16_384 else 0,
                        is_quick=size == 4096 and dtype is BFLOAT16 and kind is Norm.RMS and not has_after,
                    )
    for activation in (each for each in Activation if each is not Activation.XIELU):  # of MLPs without gates
        launches[f"gate-{activation}"] = Launch(
            call=partial(_gate, BFLOAT16, activation), kernels=("gate_units",), is_quick=activation is Activation.SILU
        )
    for dim in (64, 80, 96, 128, 256):
        for qk_norm in (QkNorm.NONE, QkNorm.HEAD, QkNorm.EACH):
            for turned, is_interleaved in ((dim, False), (dim // 2, False), (dim, True), (0, False)):
                name = f"place-{dim}-{qk_norm}-{turned}{'-interleaved' * is_interleaved}"
                call = partial(_place, dim, BFLOAT16, qk_norm, num_turned=turned, is_interleaved=is_interleaved)
                is_quick = dim == 128 and qk_norm is QkNorm.HEAD and turned == dim and not is_interleaved
                launches[name] = Launch(call=call, kernels=("place_heads",), is_quick=is_quick)
        call = partial(_place, dim, BFLOAT16, QkNorm.NONE, num_turned=dim, cached=FLOAT8)
        launches[f"place-{dim}-float8"] = Launch(call=call, kernels=("place_heads",), archs=(90,))
    return launches


def _penalise(vocab_size: int) -> None:
    line = torch.zeros(1)
    rows, counts = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, vocab_size, dtype=torch.int32)
    penalise(torch.zeros(1, vocab_size), rows, counts, rows, line, (line, line, line, line))


def _warp(vocab_size: int, *, has_top_k: bool, has_top_p: bool) -> None:
    line = torch.zeros(1)
    top_ks = torch.zeros(1, dtype=torch.int32) if has_top_k else None
    rows = torch.zeros(1, dtype=torch.int64)
    warp(torch.zeros(1, vocab_size), rows, line, top_ks, line if has_top_p else None, line)


def _choose(vocab_size: int, num_rows: int, *, is_drawn: bool) -> None:
    keys = torch.zeros(3, num_rows, dtype=torch.int32) if is_drawn else None
    choose(torch.zeros(num_rows, vocab_size), keys, 132)


def _sampling_launches() -> dict[str, Launch]:
    """Penalties, filters and choices over vocabularies of every width, in one part and in several."""
    launches = {}
    for vocab_size in (300, 50_257, 128_256, 262_144):
        name, whole, is_quick = str(vocab_size), ("choose_parts", "merge_choices"), vocab_size == 128_256
        launches[f"penalise-{name}"] = Launch(
            call=partial(_penalise, vocab_size), kernels=("penalise_rows",), is_quick=is_quick
        )
        for has_top_k, has_top_p in ((False, False), (True, False), (False, True), (True, True)):
            call = partial(_warp, vocab_size, has_top_k=has_top_k, has_top_p=has_top_p)
            launch = Launch(call=call, kernels=("warp_rows",), is_quick=is_quick and has_top_k and has_top_p)
            launches[f"warp-{name}-{has_top_k:d}{has_top_p:d}"] = launch
        for num_rows in (1, 256):
            for is_drawn in (False, True):
                call = partial(_choose, vocab_size, num_rows, is_drawn=is_drawn)
                launch = Launch(call=call, kernels=whole, is_quick=is_quick and is_drawn and num_rows == 1)
                launches[f"choose-{name}-{num_rows}-{is_drawn:d}"] = launch
    return launches


def _codes(
    kind: CodeKind, num_inputs: int, *, is_reordered: bool, has_zeros: bool, bases: torch.dtype | None = None
) -> Codes:
    num_outputs, num_groups = 128, num_inputs // 128
    groups = torch.arange(num_inputs) // 128
    return Codes(
        codes=torch.zeros(num_outputs, num_inputs, dtype=FLOAT8 if kind is CodeKind.FLOAT8 else torch.uint8),
        scales=torch.ones(num_outputs, num_groups, dtype=FLOAT32 if kind is CodeKind.FLOAT8 else FLOAT16),
        zeros=torch.full((num_outputs, num_groups), 1 if has_zeros else kind.middle, dtype=torch.uint8),
        groups=groups.flip(0) if is_reordered else groups,
        bases=None if bases is None else torch.ones(num_outputs, num_groups, dtype=bases),
    )


def _product(kind: CodeKind, dtype: torch.dtype, num_rows: int, **changes: Any) -> None:
    """With inputs cut into parts where a tile has few rows."""
    matrix = PackedMatrix.of(_codes(kind, 2048, **changes), kind)
    multiply(torch.zeros(num_rows, 2048, dtype=dtype), matrix, torch.zeros(128, dtype=dtype), 16 if num_rows > 1 else 1)


def _product_launches() -> dict[str, Launch]:
    """Few and many rows, whole and cut inputs, every kind of code; then groups in an order, zero points, and bases."""
    launches = {}
    plain = {"is_reordered": False, "has_zeros": False}
    for kind in CodeKind:
        for dtype in (BFLOAT16, FLOAT16):
            name = f"{kind.name.lower()}-{str(dtype).removeprefix('torch.')}"
            for num_rows in (1, 16, 32, 64):
                is_cut = num_rows > 1
                launches[f"product-{num_rows}-{name}"] = Launch(
                    call=partial(_product, kind, dtype, num_rows, **plain),
                    kernels=("_multiply_tile", *(["_merge"] * is_cut)),
                    is_quick=kind is CodeKind.INT4 and dtype is BFLOAT16 and num_rows == 16,
                )
        for num_rows in (1, 64):
            call = partial(_product, kind, BFLOAT16, num_rows, is_reordered=True, has_zeros=kind is not CodeKind.FLOAT8)
            kernels = ("_multiply_tile", *(["_merge"] * (num_rows > 1)))
            launches[f"product-{num_rows}-{kind.name.lower()}-reordered"] = Launch(call=call, kernels=kernels)
        matrix = PackedMatrix.of(_codes(kind, 256, **plain), kind)
        launches[f"unpack-{kind.name.lower()}"] = Launch(
            call=partial(unpack, matrix, BFLOAT16), kernels=("_unpack_tile",), is_quick=kind is CodeKind.INT4
        )
    for kind, bases in ((CodeKind.INT4, FLOAT16), (CodeKind.INT8, FLOAT32)):
        name, is_quick = kind.name.lower(), kind is CodeKind.INT4
        based = {"is_reordered": False, "has_zeros": False, "bases": bases}
        for num_rows in (1, 64):
            kernels = ("_multiply_tile", *(["_merge"] * (num_rows > 1)))
            call = partial(_product, kind, BFLOAT16, num_rows, **based)
            launches[f"product-{num_rows}-{name}-bases"] = Launch(call=call, kernels=kernels, is_quick=is_quick)
        matrix = PackedMatrix.of(_codes(kind, 256, **based), kind)
        launches[f"unpack-{name}-bases"] = Launch(
            call=partial(unpack, matrix, BFLOAT16), kernels=("_unpack_tile",), is_quick=is_quick
        )
    return launches


def _single_row(num_inputs: int, dtype: torch.dtype, *, has_bias: bool, is_gated: bool) -> None:
    x, weight = torch.zeros(1, num_inputs, dtype=dtype), torch.zeros(48, num_inputs, dtype=dtype)
    bias = torch.zeros(48, dtype=dtype) if has_bias else None
    if is_gated:
        multiply_gated_row(x, weight, bias, Activation.SILU)
    else:
        multiply_row(x, weight, bias)


def _single_row_launches() -> dict[str, Launch]:
    """Matrices of fewer inputs than a turn of the loop takes, of as many, and of more."""
    launches = {}
    for size in (576, 4096, 14_336):
        for dtype in (BFLOAT16, FLOAT16):
            for is_gated, kernel in ((False, "multiply_row"), (True, "multiply_gated_row")):
                for has_bias in (False, True):
                    name = f"{kernel.replace('_', '-')}-{size}-{str(dtype).removeprefix('torch.')}{'-bias' * has_bias}"
                    call = partial(_single_row, size, dtype, has_bias=has_bias, is_gated=is_gated)
                    is_quick = size == 4096 and dtype is BFLOAT16 and not has_bias
                    launches[name] = Launch(call=call, kernels=(kernel,), is_quick=is_quick, spilled_bytes=_FEW_SPILLED)
    return launches


def _low_rank(
    size: int,
    rank: int,
    dtype: torch.dtype,
    num_modules: int,
    *,
    num_rows: int = 20,
    out_dtype: torch.dtype | None = None,
    is_recorded: bool = False,
) -> None:
    names = [f"m{i}" for i in range(num_modules)]
    site = Site(tuple((name, size, (0, size)) for name in names), size)
    low_ranks = {name: LowRank(torch.zeros(rank, size), torch.zeros(size, rank), 1.0) for name in names}
    cpu, ops = torch.device("cpu"), TritonLowRankOps()
    weights = place([site], AdapterTensors(low_ranks, {}), dtype, cpu)
    adapter = PlacedAdapter("a", "", rank, weights)
    x, y = torch.zeros(num_rows, size, dtype=dtype), torch.zeros(num_rows, size * num_modules, dtype=out_dtype or dtype)
    if is_recorded:
        recorded = ops.recorded([site], num_rows, cpu)
        recorded.admit([RowSpan([0], 0, np.zeros(1, np.int32), adapter=adapter)])
        recorded.add(0, x, y, is_head=False)
    else:
        ops.begin([AdapterGroup(adapter, range(num_rows), (), cpu)])
        ops.add(0, x, y, is_head=False)


def _low_rank_launches() -> dict[str, Launch]:
    """Adapters of a matrix by itself, and of queries, keys and values side by side; odd ranks and large ones.

    Then those of prompts, of recorded steps of one row and of many, and of a head, with logits of float32.
    """
    kernels, launches = ("_shrink", "_expand"), {}
    for name, rule in {
        "prompt": {"num_rows": 1024},
        "recorded-1": {"num_rows": 1, "is_recorded": True},
        "recorded-64": {"num_rows": 64, "is_recorded": True},
        "head": {"out_dtype": FLOAT32},
    }.items():
        launches[f"low-rank-{name}"] = Launch(call=partial(_low_rank, 4096, 16, BFLOAT16, 2, **rule), kernels=kernels)
    for size, rank in ((576, 3), (4096, 16), (4096, 256)):
        for dtype in (BFLOAT16, FLOAT16):  # float32 is repacked for oneDNN on a CPU
            for count in (1, 3):
                launches[f"low-rank-{size}-{rank}-{str(dtype).removeprefix('torch.')}-{count}"] = Launch(
                    call=partial(_low_rank, size, rank, dtype, count),
                    kernels=kernels,
                    is_quick=(size, rank, dtype, count) == (4096, 16, BFLOAT16, 1),
                )
    return launches


_MIXTURES = {  # experts, chosen, hidden size and units
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14_336),
    "deepseek-v3": (256, 8, 7168, 2048),
    "odd": (5, 3, 1000, 90),
}


def _experts(name: str, dtype: torch.dtype, num_tokens: int, *, is_input_scaled: bool = False) -> None:
    num_experts, num_chosen, hidden_size, num_units = _MIXTURES[name]
    gate_up = torch.zeros(1, 1, 1, dtype=dtype).expand(num_experts, 2 * num_units, hidden_size)
    down = torch.zeros(1, 1, 1, dtype=dtype).expand(num_experts, hidden_size, num_units)
    stack = ExpertStack(gate_up, down, Activation.SILU)
    experts = HeldExperts([], range(num_experts), num_experts, is_input_scaled, stack)
    chosen = torch.arange(num_chosen).repeat(num_tokens, 1)
    x = torch.zeros(num_tokens, hidden_size, dtype=dtype)
    shared = None if is_input_scaled else x
    TritonExpertOps().add(experts, x, chosen, torch.ones(num_tokens, num_chosen), shared)


def _choice(num_experts: int, num_chosen: int, score: ExpertScore, *, is_scaled: bool) -> None:
    experts = ExpertsSpec(num_experts=num_experts, num_chosen=num_chosen, intermediate_size=1, score=score)
    spec = _spec(head_dim=1, experts=experts)
    router = Router(spec, experts, RandomWeights(), 0)
    if is_scaled:
        router.spec = replace(experts, is_normalized=True, scale=2.5)
        router.correction = router.expert_scale = torch.zeros(num_experts)
    TritonChoice(router)(torch.zeros(3, num_experts))


def _expert_launches() -> dict[str, Launch]:
    """Decoding rows of one and of several for each expert, and prompts, for which torch sorts the pairs."""
    launches, products = {}, ("multiply_gate_up", "multiply_down", "add_chosen")
    for name, (num_experts, num_chosen, *_) in _MIXTURES.items():
        for rows in (16, 32, 64, 128):
            num_tokens = max(1, 2 * rows * num_experts // (3 * num_chosen))
            is_small = num_tokens * num_chosen <= 2048
            for dtype in (BFLOAT16, FLOAT16, FLOAT32):
                launches[f"experts-{name}-{rows}-{str(dtype).removeprefix('torch.')}"] = Launch(
                    call=partial(_experts, name, dtype, num_tokens),
                    kernels=("lay_out_expert", *products) if is_small else products,
                    spilled_bytes=_FEW_SPILLED if dtype is FLOAT32 else 0,
                    is_quick=name == "qwen3-30b-a3b" and rows == 16 and dtype is BFLOAT16,
                )
    call = partial(_experts, "mixtral-8x7b", BFLOAT16, 1, is_input_scaled=True)
    launches["experts-mixtral-8x7b-input-scaled"] = Launch(call=call, kernels=("lay_out_expert", *products))
    for num_experts, num_chosen in ((8, 2), (128, 8), (160, 6), (512, 10)):
        for score in (ExpertScore.SOFTMAX, ExpertScore.SIGMOID):
            for is_scaled in (False, True):
                launches[f"choice-{num_experts}-{score}{'-scaled' * is_scaled}"] = Launch(
                    call=partial(_choice, num_experts, num_chosen, score, is_scaled=is_scaled),
                    kernels=("choose_experts",),
                    is_quick=num_experts == 128 and score is ExpertScore.SOFTMAX and is_scaled,
                )
    return launches


LAUNCHES: dict[str, Launch] = (
    _attention_launches()
    | _glue_launches()
    | _single_row_launches()
    | _sampling_launches()
    | _product_launches()
    | _low_rank_launches()
    | _expert_launches()
)
