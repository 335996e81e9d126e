"""One matrix product of the fused step by itself, and the weights that it multiplies by."""

import ctypes

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from funitel.model_server.cpu.native import Batch, Buffer, Code, Mode, NativeEngine, NativeOperation, Shape
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind
from funitel.model_server.quantized.outliers import Outliers


def kept(kind: MatrixKind, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as `NativeEngine.add_matrix` takes them, and in float64 what the engine makes of them."""
    if kind.has_blocks:
        number = GGMLQuantizationType[kind.name]
        blocks = gguf.quantize(weight.numpy(), number)
        return torch.from_numpy(blocks), torch.from_numpy(gguf.dequantize(blocks, number)).double()
    if kind is MatrixKind.INT8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return weight, (weight / scale).round().double() * scale.double()
    dtype = {MatrixKind.FLOAT16: torch.float16, MatrixKind.BFLOAT16: torch.bfloat16}.get(kind, torch.float32)
    return weight, weight.to(dtype).double()


def product(
    library: ctypes.CDLL,
    kind: MatrixKind,
    weight: torch.Tensor,
    x: torch.Tensor,
    activations: ActivationDtype = ActivationDtype.INT16,
    *,
    num_threads: int = 1,
    outliers: Outliers | None = None,
) -> torch.Tensor:
    """The fused product [rows, outputs] of activations [rows, inputs] and one matrix; NaN where nothing is computed."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    shape = Shape(
        hidden_size=num_inputs,
        head_dim=2,
        num_heads=1,
        num_kv_heads=1,
        intermediate_size=num_outputs,
        num_layers=1,
        block_size=16,
        num_threads=num_threads,
        level_bits=8 * activations,
    )
    engine = NativeEngine(library, shape)
    matrix, _ = engine.add_matrix(kind, num_outputs, num_inputs, [[(weight, None)]])
    if outliers is not None:
        engine.add_outliers(matrix, [[(num_outputs, outliers)]])
    engine.set_program(
        [
            NativeOperation(Code.PREPARE, Buffer.X, 0, matrix),
            NativeOperation(Code.SELECT),
            NativeOperation(Code.LINEAR, matrix, Mode.STORE, Buffer.LOGITS),
        ]
    )
    y, rows = torch.full((num_rows, num_outputs), float("nan")), torch.arange(num_rows)
    lengths, zero = np.array([num_rows], dtype=np.int32), np.zeros(1, dtype=np.int32)
    batch = Batch(
        num_tokens=num_rows,
        num_rows=1,
        num_logits=num_rows,
        logits_stride=num_outputs,
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
