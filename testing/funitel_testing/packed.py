"""Quantised layers as other projects write them, built from their published layouts one integer at a time.

Shares nothing with the code it tests: slow, plain loops over Python integers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layer:
    """Integers of a linear layer: the weight of input i, output o is (codes[i][o] - zeros[g][o]) * scales[g][o]."""

    bits: int
    codes: list[list[int]]  # [inputs][outputs]
    zeros: list[list[int]]  # [groups][outputs]
    scales: torch.Tensor  # [groups, outputs] float16
    groups: list[int]  # [inputs]

    def weight(self) -> torch.Tensor:
        """Weights [outputs, inputs] in float32."""
        codes, zeros = torch.tensor(self.codes).float(), torch.tensor(self.zeros).float()
        return ((codes - zeros[self.groups]) * self.scales.float()[self.groups]).t().contiguous()


def random_layer(
    num_inputs: int,
    num_outputs: int,
    bits: int = 4,
    group_size: int = 16,
    *,
    is_symmetric: bool = False,
    is_reordered: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer of random integers; its weights have about the spread of tiny models' ones."""
    generator = torch.Generator().manual_seed(seed)
    top = 2**bits
    size = num_inputs if group_size == -1 else group_size
    groups = [i // size for i in range(num_inputs)]
    num_groups = groups[-1] + 1
    if is_reordered:
        groups = [groups[i] for i in torch.randperm(num_inputs, generator=generator).tolist()]
    zeros = torch.randint(0, top, (num_groups, num_outputs), generator=generator)
    if is_symmetric:
        zeros = torch.full_like(zeros, top // 2)
    return Layer(
        bits=bits,
        codes=torch.randint(0, top, (num_inputs, num_outputs), generator=generator).tolist(),
        zeros=zeros.tolist(),
        scales=((torch.rand(num_groups, num_outputs, generator=generator) + 0.5) / top).half(),
        groups=groups,
    )


def gptq_tensors(
    layer: Layer, name: str, *, is_exact: bool = False, with_order: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors AutoGPTQ and TGI write: integers along inputs, zero points less one (`is_exact`: as they are)."""
    less = 0 if is_exact else 1
    zeros = [[(zero - less) % 2**layer.bits for zero in row] for row in layer.zeros]
    tensors = {
        f"{name}.qweight": _words(_turned(layer.codes), layer.bits).t().contiguous(),
        f"{name}.qzeros": _words(zeros, layer.bits),
        f"{name}.scales": layer.scales,
    }
    if with_order:
        tensors[f"{name}.g_idx"] = torch.tensor(layer.groups, dtype=torch.int32)
    return tensors


def compressed_tensors(
    layer: Layer, name: str, *, is_symmetric: bool, with_order: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors compressed-tensors writes as pack-quantized."""
    tensors = {
        f"{name}.weight_packed": _words(_turned(layer.codes), layer.bits),
        f"{name}.weight_scale": layer.scales.t().contiguous(),
        f"{name}.weight_shape": torch.tensor([len(layer.codes[0]), len(layer.codes)]),
    }
    if not is_symmetric:
        tensors[f"{name}.weight_zero_point"] = _words(_turned(layer.zeros), layer.bits, along=0)
    if with_order:
        tensors[f"{name}.weight_g_idx"] = torch.tensor(layer.groups, dtype=torch.int32)
    return tensors


def awq_tensors(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    """The tensors AutoAWQ writes: integers along outputs, those of a word interleaved."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def interleaved(rows: list[list[int]]) -> list[list[int]]:
        return [[row[start + i] for start in range(0, len(row), 8) for i in order] for row in rows]

    return {
        f"{name}.qweight": _words(interleaved(layer.codes), 4),
        f"{name}.qzeros": _words(interleaved(layer.zeros), 4),
        f"{name}.scales": layer.scales,
    }


@dataclass(frozen=True)
class Float8Layer:
    """A linear layer in float8: the weight of output o, input i is codes[o, i] times the scale of its block."""

    codes: torch.Tensor  # [outputs, inputs] float8
    scales: torch.Tensor  # of float32: [], [outputs, 1], or [blocks of outputs, blocks of inputs]
    block: tuple[int, int] | None = None  # outputs, inputs

    def weight(self) -> torch.Tensor:
        """Weights [outputs, inputs] in float32."""
        weight = self.codes.float()
        if self.block is None:
            return weight * self.scales
        for o in range(weight.shape[0]):
            for i in range(weight.shape[1]):
                weight[o, i] *= self.scales[o // self.block[0], i // self.block[1]]
        return weight

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """As checkpoints have them, with a scale of activations."""
        scales = "weight_scale" if self.block is None else "weight_scale_inv"
        return {f"{name}.weight": self.codes, f"{name}.{scales}": self.scales, f"{name}.input_scale": torch.ones(1)}


def random_float8(
    num_inputs: int, num_outputs: int, *, block: tuple[int, int] | None = None, is_whole: bool = False, seed: int = 0
) -> Float8Layer:
    """A layer of random numbers with a scale for each output, for each block, or (`is_whole`) for all."""
    generator = torch.Generator().manual_seed(seed)
    shape = [] if is_whole else [num_outputs, 1]
    if block is not None:
        shape = [-(-num_outputs // block[0]), -(-num_inputs // block[1])]
    codes = (torch.randn(num_outputs, num_inputs, generator=generator) * 16).to(torch.float8_e4m3fn)
    return Float8Layer(codes, (torch.rand(shape, generator=generator) + 0.5) / 64, block)


def _turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _words(rows: list[list[int]], bits: int, along: int = 1) -> torch.Tensor:
    """32-bit words of each row, or each column, as signed integers; the first integer is the lowest."""
    if along == 0:
        return _words(_turned(rows), bits).t().contiguous()
    count = 32 // bits
    words = []
    for row in rows:
        packed = []
        for start in range(0, len(row), count):
            word = sum(value << (bits * i) for i, value in enumerate(row[start : start + count]))
            packed.append(word - 2**32 if word >= 2**31 else word)
        words.append(packed)
    return torch.tensor(words, dtype=torch.int32)
