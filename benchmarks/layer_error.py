"""How far is one layer off when its weights were never rounded before? Random normal weights, each kind of matrix.

The demo model's weights come from a 4-bit file, which flatters every tier. Here weights and activations are normal and
independent, so that nothing of the rounding is known to either. `rounding` is the error of the outputs against the
weights as they were drawn, `product` that of the fused product against the weights as they are kept: what its int16
activations and order of sums add. Errors are norms of differences over norms. The last line on stdout is one JSON
object.

    python benchmarks/layer_error.py --num-inputs 576 1536
"""

from __future__ import annotations

import argparse
import ctypes
import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from funitel.model_server.cpu.build import build
from funitel.model_server.cpu.native import Batch, Buffer, Code, Engine, Mode, Shape, load_library
from funitel.model_server.cpu.tiers import Kind
from funitel.model_server.hub import DEFAULT_CACHE_DIR

NUM_OUTPUTS, NUM_ROWS = 512, 64


def kept(kind: Kind, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as `Engine.add_matrix` takes them, and in float64 what the engine makes of them."""
    if kind.has_blocks:
        number = GGMLQuantizationType[kind.name]
        blocks = gguf.quantize(weight.numpy(), number)
        return torch.from_numpy(blocks), torch.from_numpy(gguf.dequantize(blocks, number)).double()
    if kind is Kind.INT8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return weight, (weight / scale).round().double() * scale.double()
    return weight, (weight.half() if kind is Kind.FLOAT16 else weight).double()


def product(library: ctypes.CDLL, kind: Kind, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The fused product [rows, outputs] of activations [rows, inputs] and one matrix."""
    num_rows, num_inputs = x.shape
    shape = Shape(
        hidden_size=num_inputs,
        head_dim=2,
        num_heads=1,
        num_kv_heads=1,
        intermediate_size=NUM_OUTPUTS,
        num_layers=1,
        block_size=16,
        num_threads=1,
    )
    engine = Engine(library, shape)
    matrix, _ = engine.add_matrix(kind, NUM_OUTPUTS, num_inputs, [[(weight, None)]])
    engine.set_program(
        [(Code.PREPARE, Buffer.X, 0, matrix), (Code.SELECT,), (Code.LINEAR, matrix, Mode.STORE, Buffer.LOGITS)]
    )
    y, rows = torch.empty(num_rows, NUM_OUTPUTS), torch.arange(num_rows)
    lengths, zero = np.array([num_rows], dtype=np.int32), np.zeros(1, dtype=np.int32)
    batch = Batch(
        num_tokens=num_rows,
        num_rows=1,
        num_logits=num_rows,
        logits_stride=NUM_OUTPUTS,
        logit_indices=rows.data_ptr(),
        starts=zero.ctypes.data,
        lengths=lengths.ctypes.data,
        blocks=zero.ctypes.data,
        table_starts=zero.ctypes.data,
        x=x.data_ptr(),
        logits=y.data_ptr(),
    )
    engine.run(batch, 0)
    return y


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    """Print a line for each kind and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-inputs", type=int, nargs="+", default=[576, 1536, 4096], help="multiples of 32")
    options = parser.parse_args()
    library = load_library(build(DEFAULT_CACHE_DIR.expanduser()))
    torch.manual_seed(0)
    table = []
    for num_inputs in options.num_inputs:
        weight, x = torch.randn(NUM_OUTPUTS, num_inputs), torch.randn(NUM_ROWS, num_inputs)
        for kind in Kind:
            given, made = kept(kind, weight)
            found = product(library, kind, given, x).double()
            figures = {
                "rounding": relative(x.double() @ made.T, x.double() @ weight.double().T),
                "product": relative(found, x.double() @ made.T),
            }
            table.append({"num_inputs": num_inputs, "kind": kind.name.lower()} | figures)
            print(f"{num_inputs:5} {kind.name.lower():8}", *(f"{name} {value:.1e}" for name, value in figures.items()))
    print(json.dumps(table))


if __name__ == "__main__":
    main()
