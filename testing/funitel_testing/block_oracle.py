"""Reference decoder of GGUF's quantised types, one number at a time, written from their documented layout.

Source: the structs in ggml's `ggml-common.h`.
"""

import struct
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Numbers = Iterator[float]


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _nibble(block: bytes, at: int, i: int) -> int:
    """Of 32 numbers in 16 bytes: the first 16 in the low halves, the others in the high ones."""
    return block[at + i % 16] >> (4 * (i // 16)) & 15


def _q4_0(block: bytes) -> Numbers:
    return (_half(block, 0) * (_nibble(block, 2, i) - 8) for i in range(32))


def _q4_1(block: bytes) -> Numbers:
    return (_half(block, 0) * _nibble(block, 4, i) + _half(block, 2) for i in range(32))


def _fifth(block: bytes, at: int, i: int) -> int:
    return (block[at + i // 8] >> (i % 8) & 1) << 4


def _q5_0(block: bytes) -> Numbers:
    return (_half(block, 0) * ((_nibble(block, 6, i) | _fifth(block, 2, i)) - 16) for i in range(32))


def _q5_1(block: bytes) -> Numbers:
    return (_half(block, 0) * (_nibble(block, 8, i) | _fifth(block, 4, i)) + _half(block, 2) for i in range(32))


def _q8_0(block: bytes) -> Numbers:
    return (_half(block, 0) * struct.unpack_from("b", block, 2 + i)[0] for i in range(32))


def _two_bits(block: bytes, at: int, i: int) -> int:
    """Of 256 numbers in 64 bytes: each 32 bytes hold four times 32 numbers, pair of bits by pair of bits."""
    half, rest = divmod(i, 128)
    return block[at + 32 * half + rest % 32] >> (2 * (rest // 32)) & 3


def _q2_k(block: bytes) -> Numbers:
    scale, least = _half(block, 80), _half(block, 82)
    for i in range(256):
        packed = block[i // 16]
        yield np.float32(scale * (packed & 15)) * _two_bits(block, 16, i) - np.float32(least * (packed >> 4))


def _q3_k(block: bytes) -> Numbers:
    for i in range(256):
        group = i // 16
        low = block[96 + group % 8] >> (4 * (group // 8)) & 15
        scale = (low | (block[104 + group % 4] >> (2 * (group // 4)) & 3) << 4) - 32
        third = block[i % 32] >> (i // 32) & 1
        yield np.float32(_half(block, 108) * scale) * (_two_bits(block, 32, i) - (0 if third else 4))


def _six_bits(block: bytes, at: int, group: int) -> tuple[int, int]:
    """Scale and minimum of one of eight groups, packed into twelve bytes."""
    if group < 4:
        return block[at + group] & 63, block[at + 4 + group] & 63
    low, above = block[at + 4 + group], (block[at + group - 4] >> 6, block[at + group] >> 6)
    return low & 15 | above[0] << 4, low >> 4 | above[1] << 4


def _four_bits(block: bytes, at: int, i: int) -> int:
    """Of 256 numbers in 128 bytes: each 32 bytes hold 32 numbers in their low halves, then 32 in the high ones."""
    return block[at + 32 * (i // 64) + i % 32] >> (4 * (i // 32 % 2)) & 15


def _q4_k(block: bytes) -> Numbers:
    for i in range(256):
        scale, least = _six_bits(block, 4, i // 32)
        code = _four_bits(block, 16, i)
        yield np.float32(_half(block, 0) * scale) * code - np.float32(_half(block, 2) * least)


def _q5_k(block: bytes) -> Numbers:
    for i in range(256):
        scale, least = _six_bits(block, 4, i // 32)
        code = _four_bits(block, 48, i) | (block[16 + i % 32] >> (i // 32) & 1) << 4
        yield np.float32(_half(block, 0) * scale) * code - np.float32(_half(block, 2) * least)


def _q6_k(block: bytes) -> Numbers:
    for i in range(256):
        half, rest = divmod(i, 128)
        low = block[64 * half + rest % 64] >> (4 * (rest // 64)) & 15
        high = block[128 + 32 * half + rest % 32] >> (2 * (rest // 32)) & 3
        scale = struct.unpack_from("b", block, 192 + i // 16)[0]
        yield np.float32(_half(block, 208) * scale) * ((low | high << 4) - 32)


# Type -> numbers and bytes of a block, where its 16-bit scales lie, and what it stands for.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], Numbers]]] = {
    "Q4_0": (32, 18, (0,), _q4_0),
    "Q4_1": (32, 20, (0, 2), _q4_1),
    "Q5_0": (32, 22, (0,), _q5_0),
    "Q5_1": (32, 24, (0, 2), _q5_1),
    "Q8_0": (32, 34, (0,), _q8_0),
    "Q2_K": (256, 84, (80, 82), _q2_k),
    "Q3_K": (256, 110, (108,), _q3_k),
    "Q4_K": (256, 144, (0, 2), _q4_k),
    "Q5_K": (256, 176, (0, 2), _q5_k),
    "Q6_K": (256, 210, (208,), _q6_k),
}


def random_blocks(kind: str, shape: tuple[int, int], seed: int, scale: float = 0.01) -> npt.NDArray[np.uint8]:
    """Blocks of a matrix of `shape`: [outputs, bytes]; every bit is drawn but those of the scales, near `scale`."""
    count, num_bytes, scales, _ = BLOCKS[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // count, num_bytes), np.uint8)
    for at in scales:
        drawn = generator.uniform(0.2, 1, blocks.shape[:2]) * scale * generator.choice([-1, 1], blocks.shape[:2])
        blocks[:, :, at : at + 2] = drawn.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def values_of(kind: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What rows of blocks stand for."""
    _, num_bytes, _, read = BLOCKS[kind]
    blocks = rows.reshape(-1, num_bytes)
    return np.array([list(read(block.tobytes())) for block in blocks], np.float32).reshape(len(rows), -1)
