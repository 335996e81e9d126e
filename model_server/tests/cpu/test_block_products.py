"""Products with blocks of codes: every type equals its oracle, on every instruction set, at extreme values too."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.quantized.block_types import BlockType
from funitel_testing import inferflow_blocks, products

Floats = npt.NDArray[np.float32]
SETS = [name for name, needs, _ in compiler.INSTRUCTION_SETS if needs <= cpu_flags()]
EVERY_SET = pytest.mark.parametrize("instruction_set", SETS)
KINDS = [kind for kind in MatrixKind if kind.has_blocks]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
EVERY_WIDTH = pytest.mark.parametrize("bits", [8, 16])
MOST = {8: 127, 16: 127 * 254}
OUTLIER = 5.0  # as in levels.h


def random_blocks(kind: MatrixKind, num_outputs: int, num_inputs: int, seed: int = 5) -> npt.NDArray[np.uint8]:
    """Blocks of any codes and small integers, with finite scales; [outputs, bytes]."""
    block = BlockType[kind.name]
    random = np.random.default_rng(seed)
    count = num_outputs * num_inputs // block.num_inputs
    raw = random.integers(0, 256, (count, block.num_bytes), dtype=np.uint8)
    for place in half_places(kind):
        scales = random.uniform(0.001, 0.02, count).astype(np.float16) * random.choice([-1, 1], count).astype(
            np.float16
        )
        raw[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    if kind is MatrixKind.MXFP4:
        raw[:, 0] = random.integers(118, 126, count)
    return raw.reshape(num_outputs, -1)


def half_places(kind: MatrixKind) -> tuple[int, ...]:
    """Where the float16 numbers of a block are."""
    name = kind.name
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") or kind >= MatrixKind.Q8_B32T1:
        return 0, 2
    return {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(name, (0,))


def values_of(kind: MatrixKind, raw: npt.NDArray[np.uint8]) -> Floats:
    if kind >= MatrixKind.A16W8_G32:
        return group_values(kind, raw)
    if kind >= MatrixKind.Q8_B32T1:
        name = next(each for each in inferflow_blocks.BYTES if each.upper().startswith(kind.name))
        size = inferflow_blocks.BYTES[name]
        return np.stack(
            [
                np.concatenate(
                    [inferflow_blocks.decode(name, row[i : i + size].tobytes()) for i in range(0, len(row), size)]
                )
                for row in raw
            ]
        )
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name]).astype(np.float32)


def group_values(kind: MatrixKind, raw: npt.NDArray[np.uint8]) -> Floats:
    """Zero, scale, codes: a weight is (code - zero) x scale."""
    bits, size = (8 if "W8" in kind.name else 4), int(kind.name.rpartition("G")[2])
    blocks = raw.reshape(len(raw), -1, 4 + size * bits // 8)
    zeros, scales = (blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    data = blocks[..., 4:]
    codes = data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:2], -1)
    return ((codes.astype(np.float32) - zeros) * scales).reshape(len(raw), -1)


def product(kind: MatrixKind, weight: torch.Tensor, x: Floats, bits: int, instruction_set: str) -> Floats:
    """x [rows, inputs] by a weight of one kind, on two threads: [rows, outputs]."""
    library, rows = load_library(cache_folder(None), instruction_set), torch.from_numpy(np.ascontiguousarray(x))
    return products.product(library, kind, weight, rows, ActivationDtype(bits // 8), num_threads=2).numpy()


def levels_of(x: Floats, bits: int) -> npt.NDArray[np.float64]:
    """Activations as the engine rounds them: a scale for each 32 inputs, and 16 bits where there is an outlier."""
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(over="ignore"):
        is_fine = (bits == 16) | (most**2 > np.float32(OUTLIER**2) * np.mean(blocks**2, axis=2, keepdims=True))
    most_level = np.where(is_fine, MOST[16], MOST[8]).astype(np.float32)
    inverse = np.where(most > 0, most_level / np.where(most > 0, most, 1), 0).astype(np.float32)
    levels = np.rint(blocks * inverse)
    return (levels.astype(np.float64) * (most / most_level).astype(np.float64)).reshape(x.shape)


def with_outliers(random: np.random.Generator, num_rows: int, num_inputs: int) -> Floats:
    """Activations of which some blocks of 32, in some rows, have one input far above the others."""
    x = random.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x[random.random(x.shape) < 0.01] *= 50
    return x


@EVERY_SET
@EVERY_WIDTH
@EVERY_KIND
def test_a_product_is_that_of_the_values_of_gguf(kind: MatrixKind, bits: int, instruction_set: str) -> None:
    size = 768
    raw = random_blocks(kind, size, size)
    random = np.random.default_rng(7)
    x = with_outliers(random, 23, size)
    found = product(kind, torch.from_numpy(raw), x, bits, instruction_set)
    weights = values_of(kind, raw).astype(np.float64)
    exact, rounded = x.astype(np.float64) @ weights.T, levels_of(x, bits) @ weights.T
    size_of = np.linalg.norm(exact)
    assert np.linalg.norm(found - rounded) / size_of < 2e-6
    assert np.linalg.norm(found - exact) / size_of < {8: 1e-2, 16: 1e-4}[bits]


@EVERY_WIDTH
@EVERY_KIND
def test_every_instruction_set_gives_the_same_bits(kind: MatrixKind, bits: int) -> None:
    size = 256
    raw = torch.from_numpy(random_blocks(kind, size, size))
    x = with_outliers(np.random.default_rng(8), 9, size)
    first, *others = [product(kind, raw, x, bits, each) for each in SETS]
    for other in others:
        assert np.array_equal(first, other)


@EVERY_WIDTH
@EVERY_KIND
def test_a_row_has_the_same_bits_in_any_company(kind: MatrixKind, bits: int) -> None:
    size = 256
    raw = torch.from_numpy(random_blocks(kind, size, size))
    x = with_outliers(np.random.default_rng(9), 31, size)
    every = product(kind, raw, x, bits, SETS[0])
    for count in range(1, 14):
        assert np.array_equal(product(kind, raw, x[:count], bits, SETS[0]), every[:count])


@EVERY_SET
@EVERY_WIDTH
@EVERY_KIND
@pytest.mark.parametrize("codes", [0x00, 0x7F, 0x80, 0xFF])
def test_no_sum_overflows_at_extreme_values(kind: MatrixKind, bits: int, codes: int, instruction_set: str) -> None:
    """Every code at the end of its range, against activations of the largest level and of either sign."""
    size = 256
    raw = random_blocks(kind, size, size).reshape(-1, BlockType[kind.name].num_bytes)
    halves = [raw[:, place : place + 2].copy() for place in half_places(kind)]
    exponents = raw[:, 0].copy()
    raw[:] = codes
    for place, half in zip(half_places(kind), halves, strict=True):
        raw[:, place : place + 2] = half
    if kind is MatrixKind.MXFP4:
        raw[:, 0] = exponents
    raw = raw.reshape(size, -1)
    x = np.ones((8, size), dtype=np.float32) * np.float32(3.5)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, 1::2] *= -1
    x[4, ::4] = x[4, 1::4] = -3.5
    x[5, 16:] *= -1
    x[6] = 0
    x[7] *= np.float32(1e30)
    found = product(kind, torch.from_numpy(raw), x, bits, instruction_set)
    weights = values_of(kind, raw).astype(np.float64)
    rounded = levels_of(x, bits) @ weights.T
    bound = np.abs(levels_of(x, bits)) @ np.abs(weights).T
    if kind >= MatrixKind.Q8_B32T1 and BlockType[kind.name].num_bytes > 32 and "8" in kind.name[:5]:
        # Codes of 8 bits lie around 128 here, which scale and base make up for; scales are up to 0.02.
        bound += 128 * 0.02 * np.abs(levels_of(x, bits)).sum(axis=1, keepdims=True)
    assert (np.abs(found - rounded) <= 1e-5 * bound).all()
    assert (found[6] == 0).all()


def test_a_block_with_an_outlier_loses_no_more_than_one_without() -> None:
    size = 256
    raw = random_blocks(MatrixKind.Q8_0, size, size)
    weights = values_of(MatrixKind.Q8_0, raw).astype(np.float64)
    plain = np.random.default_rng(4).standard_normal((16, size)).astype(np.float32)
    spiked = plain.copy()
    spiked[:, ::32] = 300
    errors = []
    for x in (plain, spiked):
        found = product(MatrixKind.Q8_0, torch.from_numpy(raw), x, 8, SETS[0])
        errors.append(np.linalg.norm(found - x.astype(np.float64) @ weights.T))
    assert errors[1] < errors[0]


@EVERY_SET
@EVERY_WIDTH
@pytest.mark.parametrize("size", [37, 45, 64, 576])
def test_int8_takes_any_number_of_inputs(size: int, bits: int, instruction_set: str) -> None:
    random = np.random.default_rng(3)
    weight = torch.from_numpy(random.standard_normal((size, size)).astype(np.float32))
    x = random.standard_normal((5, size)).astype(np.float32)
    found = product(MatrixKind.INT8, weight, x, bits, instruction_set)
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = torch.round(weight / scales).double()
    padded = np.zeros((5, -(-size // 32) * 32), dtype=np.float32)
    padded[:, :size] = x
    rounded = levels_of(padded, bits)[:, :size] @ (codes * scales.double()).numpy().T
    assert np.linalg.norm(found - rounded) / np.linalg.norm(rounded) < 1e-5
