"""How near are the matrix products of the fused CPU step to what the machine can do?

A product of few rows is bound by reading the weights, one of many by arithmetic. So every shape is held against two
roofs measured in the same run: bytes over the bandwidth of a plain sum over memory, and multiply-adds over the rate
of the same kernel with weights that stay in the cache. `share` is the part of the nearer roof that is reached; each
figure is the best of many, as other work on the machine only adds time. The weights of a shape are repeated until they
exceed the caches. The last line on stdout is one JSON object.

    python benchmarks/kernels.py smollm2-135m-instruct --tier int8 --rows 1 4 16 64
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

import numpy as np
import torch

from funitel.model_server.checkpoint import read_json
from funitel.model_server.cpu.build import build
from funitel.model_server.cpu.native import Batch, Buffer, Code, Engine, Mode, Shape, load_library
from funitel.model_server.cpu.program import matrix_bytes
from funitel.model_server.cpu.tiers import Tier
from funitel.model_server.families import spec_of
from funitel.model_server.hub import DEFAULT_CACHE_DIR, resolve

COLD_BYTES = 256 << 20
SECONDS = 1.0


class Product:
    """The product of some rows with matrices of one shape, one after the other."""

    def __init__(self, library: ctypes.CDLL, tier: Tier, num_outputs: int, num_inputs: int, count: int, threads: int):
        self.num_inputs, self.count = num_inputs, count
        shape = Shape(
            hidden_size=num_inputs,
            head_dim=2,
            num_heads=1,
            num_kv_heads=1,
            intermediate_size=num_outputs,
            num_layers=1,
            block_size=16,
            num_threads=threads,
        )
        self.engine = Engine(library, shape)
        program: list[tuple[int, ...]] = []
        weight = torch.randn(num_outputs, num_inputs)
        for _ in range(count):
            matrix, _ = self.engine.add_matrix(tier, num_outputs, num_inputs, [[(weight, None)]])
            program += [(Code.PREPARE, Buffer.X, 0, matrix), (Code.LINEAR, matrix, Mode.STORE, Buffer.HIDDEN)]
        self.engine.set_program(program)

    def seconds(self, num_rows: int) -> float:
        """Least time of one product, laying out its rows included."""
        x = torch.randn(num_rows, self.num_inputs)
        ints = {name: np.zeros(1, dtype=np.int32) for name in ("starts", "blocks", "table_starts")}
        lengths = np.array([num_rows], dtype=np.int32)
        batch = Batch(num_tokens=num_rows, num_rows=1, x=x.data_ptr(), lengths=lengths.ctypes.data)
        for name, values in ints.items():
            setattr(batch, name, values.ctypes.data)
        best, end = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            begin = time.perf_counter()
            self.engine.run(batch, 0)
            best = min(best, time.perf_counter() - begin)
        return best / self.count


def bandwidth(threads: int) -> float:
    """Bytes a second that a sum over memory reads."""
    torch.set_num_threads(threads)
    values = torch.zeros(COLD_BYTES // 4)
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - begin)
    return COLD_BYTES / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tier", choices=[tier.label for tier in Tier], default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    tier = Tier[options.tier.upper()]
    spec = spec_of(read_json(resolve(options.model).folder / "config.json"))
    library = load_library(build(DEFAULT_CACHE_DIR.expanduser()))
    heads, hidden, units = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    shapes = {
        "qkv": (heads + 2 * spec.num_kv_heads * spec.head_dim, hidden),
        "out": (hidden, heads),
        "up": (units * (2 if spec.is_gated else 1), hidden),
        "down": (hidden, units),
        "head": (spec.vocab_size, hidden),
    }
    cached = Product(library, tier, 256, 512, 8, options.threads)
    read = rate = 0.0
    table: list[dict[str, Any]] = []
    for name, (num_outputs, num_inputs) in shapes.items():
        num_bytes = matrix_bytes(tier, num_outputs, num_inputs)
        product = Product(library, tier, num_outputs, num_inputs, max(1, COLD_BYTES // num_bytes), options.threads)
        # Roofs are measured again beside every shape: on a shared machine one moment says little.
        read = max(read, bandwidth(options.threads))
        rate = max(rate, 240 * 256 * 512 / cached.seconds(240))
        for rows in options.rows:
            taken, work = product.seconds(rows), rows * num_outputs * num_inputs
            row = {"shape": f"{name} {num_inputs}->{num_outputs}", "rows": rows, "microseconds": taken * 1e6}
            table.append(row | {"gb_s": num_bytes / taken / 1e9, "gmac_s": work / taken / 1e9})
    print(f"{tier.label}, {options.threads} threads: {read / 1e9:.1f} GB/s, {rate / 1e9:.0f} GMAC/s in the cache")
    for row in table:
        row["share"] = max(row["gb_s"] * 1e9 / read, row["gmac_s"] * 1e9 / rate)
        print(
            f"{row['shape']:20} rows {row['rows']:3}  {row['microseconds']:8.1f} us  {row['gb_s']:6.1f} GB/s  "
            f"{row['gmac_s']:6.1f} GMAC/s  {row['share']:5.0%} of the roof"
        )
    print(json.dumps({"tier": tier.label, "gb_s": read / 1e9, "gmac_s": rate / 1e9, "shapes": table}))


if __name__ == "__main__":
    main()
