"""Measure decode steps of a mixture of experts in process, beside the weights that they read.

The model has the sizes of Qwen3-30B-A3B with fewer layers and random weights: 128 experts of 768 units, 8 of a token. A
step reads the attention, the head and those experts that some row passes, each once, so that memory bounds its time
until the rows share experts. `roof` is what the machine reads at best, measured beside each round. Times are the least
of all steps of a round, and of all rounds. The last line on stdout is one JSON object.

    python benchmarks/mixture.py --kind Q4_0 --layers 8
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from funitel.model_server.checkpoint.storage import Range
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.kernel_bench.roofs import Roofs
from funitel_testing.cache import usual_cache
from funitel_testing.forward_worker import fused_library
from funitel_testing.random_weights import RandomWeights

CPU, BLOCK_SIZE, CONTEXT = torch.device("cpu"), 16, 64
POOL = 1 << 24
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


class PooledWeights(RandomWeights):
    """Random tensors cut from one pool, made as fast as they are packed; matrices are blocks of `kind`."""

    def __init__(self, kind: BlockType | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self._kind = kind
        self._pool = torch.randn(POOL, generator=generator)

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Weights."""
        if len(shape) == 1:
            return torch.ones(shape[0])
        if "mlp.gate." in name or "embed" in name:  # no two experts and tokens alike
            return super().read(name, shape, rows=rows, columns=columns, dtype=dtype)
        count = shape[0] * shape[1]
        values = self._pool.repeat(-(-count // POOL))[:count] if count > POOL else self._pool[:count]
        values = values.view(*shape) * shape[1] ** -0.5
        return values[slice(*(rows or (None, None))), slice(*(columns or (None, None)))]

    def block_type(self, stem: str, columns: Range | None = None) -> BlockType | None:
        """See Weights."""
        return None if "embed" in stem else self._kind

    def read_blocks(
        self, stem: str, num_outputs: int, num_inputs: int, *, rows: Range | None = None, columns: Range | None = None
    ) -> torch.Tensor:
        """See Weights."""
        assert self._kind is not None
        return blocks_of(self._kind, num_outputs, num_inputs)[slice(*(rows or (None, None)))]


@cache
def blocks_of(kind: BlockType, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Blocks [outputs, bytes] of small random numbers."""
    import gguf

    num_rows = min(num_outputs, 256)
    weights = np.random.default_rng(0).standard_normal((num_rows, num_inputs)).astype(np.float32) * num_inputs**-0.5
    some = torch.from_numpy(gguf.quantize(weights, gguf.GGMLQuantizationType[kind.name]))
    return some.repeat(-(-num_outputs // num_rows), 1)[:num_outputs].contiguous()


class Steps:
    """Steps of some rows in the middle of their contexts."""

    def __init__(self, decoder: FusedDecoder, spec: ModelSpec) -> None:
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        self._decoder = decoder
        self._pool = KVCache(spec, heads, 400, BLOCK_SIZE, decoder.kv_dtype, CPU)
        self._tokens = torch.randint(
            0, spec.vocab_size, (1 << 16,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        self._at = 0

    def seconds(self, num_rows: int) -> tuple[float, int]:
        """Seconds of one step, and the bytes of weights that it read."""
        rows = []
        for i in range(num_rows):
            table = np.arange(1 + 6 * i, 7 + 6 * i, dtype=np.int32)
            rows.append(RowSpan([self._tokens[self._at % len(self._tokens)]], CONTEXT, table, "last"))
            self._at += 1
        batch = ForwardBatch.build(rows, BLOCK_SIZE, CPU)
        begin = time.perf_counter()
        self._decoder(batch, self._pool)
        return time.perf_counter() - begin, self._decoder.program.engine.bytes_read


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="Q4_0", help="INT8, or a type of GGUF blocks that gguf can make")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each number of rows in a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    spec = spec_of({**SIZES, "num_hidden_layers": options.layers})
    kind = None if options.kind == "INT8" else BlockType[options.kind]
    tier, weights = Tier.INT8 if kind is None else Tier.GGUF, PooledWeights(kind)
    held = weight_bytes(spec, TensorParallel(), tier, weights.block_type)
    print(f"{options.kind}, {options.layers} layers, {held / 1e9:.2f} GB of weights, {options.threads} threads")
    decoder = FusedDecoder(
        spec,
        weights,
        TensorParallel(),
        fused_library(),
        tier=tier,
        block_size=BLOCK_SIZE,
        num_threads=options.threads,
    )
    roofs, steps = Roofs(usual_cache(), num_threads=options.threads, num_bytes=1 << 28), Steps(decoder, spec)
    found: dict[int, list[tuple[float, int]]] = {count: [] for count in options.rows}
    for _ in range(options.rounds):
        roofs.measure(MatrixKind.INT8, passes=1)
        for count, each in found.items():
            each += [steps.seconds(count) for _ in range(options.steps)]
    roof, results = roofs.read_bytes_s, []
    for count, each in found.items():
        seconds, num_bytes = min(each, key=lambda step: step[0] / step[1])
        mean = sum(size for _, size in each) / len(each)
        results.append(
            {
                "rows": count,
                "ms": round(mean / num_bytes * seconds * 1e3, 2),
                "read_gb": round(mean / 1e9, 3),
                "gb_s": round(num_bytes / seconds / 1e9, 2),
                "share_of_roof": round(num_bytes / seconds / roof, 3),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()))
    about = {"kind": options.kind, "layers": options.layers, "held_gb": held / 1e9, "roof_gb_s": roof / 1e9}
    print(json.dumps(about | {"steps": results}))


if __name__ == "__main__":
    main()
