"""Measure the quantisation error of one layer with random normal weights, for each kind of matrix.

The demo model's weights come from a 4-bit file, which flatters every tier. Here weights and activations are normal and
independent, so that nothing of the rounding is known to either. `rounding` is the error of the outputs against the
weights as they were drawn, `product` that of the fused product against the weights as they are kept: what its int16
activations and order of sums add. Errors are norms of differences over norms. The last line on stdout is one JSON
object.

    python benchmarks/layer_error.py --num-inputs 576 1536
"""

from __future__ import annotations

import argparse
import json

import torch

from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.hub.resolve import DEFAULT_CACHE_DIR
from funitel_testing.products import kept, product

NUM_OUTPUTS, NUM_ROWS = 512, 64


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    """Print a line for each kind and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-inputs", type=int, nargs="+", default=[576, 1536, 4096], help="multiples of 32")
    options = parser.parse_args()
    library = load_library(DEFAULT_CACHE_DIR.expanduser())
    torch.manual_seed(0)
    table = []
    for num_inputs in options.num_inputs:
        weight, x = torch.randn(NUM_OUTPUTS, num_inputs), torch.randn(NUM_ROWS, num_inputs)
        for kind in MatrixKind:
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
