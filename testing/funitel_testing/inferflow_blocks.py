"""Blocks of weights in NumPy, one at a time, written from the published description alone; see `block_formats`.

The description: blocks of B consecutive weights of a row, computed in float32, with lo and hi the smallest and the
largest. Type A: scale = (hi - lo) / D, code = floor((w - lo) / scale + 0.5), base = lo. Type B: scale = (hi - lo) /
2^k, base = lo + scale / 2, code = floor((w - lo) / scale + 1e-4). Scale and base are stored as float16. Codes are
computed with scales that are not rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
ONE = np.float32(1)


def nibbles(codes: list[int]) -> bytes:
    """Neighbours together, the even one in the low half."""
    return bytes((codes[i] & 15) | (codes[i + 1] & 15) << 4 for i in range(0, len(codes), 2))


def two_bits(codes: list[int]) -> bytes:
    """Four in a byte, from low to high."""
    return bytes(sum((codes[i + j] & 3) << 2 * j for j in range(4)) for i in range(0, len(codes), 4))


def one_bit(codes: list[int]) -> bytes:
    """Eight in a byte, from low to high."""
    return bytes(sum((codes[i + j] & 1) << j for j in range(8)) for i in range(0, len(codes), 8))


def pairs(codes: list[int]) -> bytes:
    """The 3.5-bit scheme: bit 6 of 32 pairs in 4 bytes, bits 4 and 5 in 8 bytes, bits 0 to 3 in 16 bytes."""
    numbers = [codes[2 * i] + 11 * codes[2 * i + 1] for i in range(32)]
    return one_bit([n >> 6 for n in numbers]) + two_bits([n >> 4 for n in numbers]) + nibbles(numbers)


def q5_of_32(codes: list[int]) -> bytes:
    """Top bits, then byte j with weight j in the low half and weight j + 16 in the high one."""
    return one_bit([c >> 4 for c in codes]) + bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))


@dataclass(frozen=True)
class Layout:
    """One row of the table: inputs of a block, D or 2^k, and how codes lie."""

    inputs: int
    levels: int
    pack: Callable[[list[int]], bytes]
    is_middle: bool = False
    scale_first: bool = False


LAYOUTS = {
    "q8_b32t1": Layout(32, 255, bytes),
    "q6_b64t1": Layout(64, 63, lambda c: two_bits([x >> 4 for x in c]) + nibbles(c)),
    "q5_b64t1": Layout(64, 31, lambda c: one_bit([x >> 4 for x in c]) + nibbles(c)),
    "q5_b32t1": Layout(32, 31, q5_of_32, scale_first=True),
    "q4_b32t1a": Layout(32, 15, nibbles),
    "q4_b32t1b": Layout(32, 16, nibbles, is_middle=True),
    "q4_b64t1": Layout(64, 15, nibbles),
    "q3h_b64t1": Layout(64, 10, pairs),
    "q3_b32t1a": Layout(32, 7, lambda c: one_bit([x >> 2 for x in c]) + two_bits(c)),
    "q3_b32t1b": Layout(32, 8, lambda c: one_bit([x >> 2 for x in c]) + two_bits(c), is_middle=True),
    "q2_b32t1a": Layout(32, 3, two_bits),
    "q2_b32t1b": Layout(32, 4, two_bits, is_middle=True),
}
BYTES = {
    "q8_b32t1": 36,
    "q8_b32t2": 34,
    "q6_b64t1": 52,
    "q5_b64t1": 44,
    "q5_b32t1": 24,
    "q4_b32t1a": 20,
    "q4_b32t1b": 20,
    "q4_b64t1": 36,
    "q3h_b64t1": 32,
    "q3_b32t1a": 16,
    "q3_b32t1b": 16,
    "q2_b32t1a": 12,
    "q2_b32t1b": 12,
}


def encode(name: str, weights: Floats, divisor: int | None = None) -> bytes:
    """One block; `divisor` is D where it is not the natural one, and a scale below 1e-5 then zeroes all codes."""
    w = weights.astype(np.float32)
    if name == "q8_b32t2":
        scale = np.float32(np.abs(w).max()) / np.float32(127)
        codes = np.floor(w / scale + np.float32(0.5)) if scale else np.zeros_like(w)
        if divisor is not None and scale < 1e-5:
            codes = np.zeros_like(w)
        return half(scale) + np.clip(codes, -128, 127).astype(np.int8).tobytes()
    layout = LAYOUTS[name]
    low, high = w.min(), w.max()
    levels = divisor or layout.levels
    scale = (high - low) / np.float32(levels)
    is_constant = scale == 0 or (divisor is not None and scale < 1e-5)
    base = low + scale / np.float32(2) if layout.is_middle else low
    top = levels - 1 if layout.is_middle else levels
    codes = np.zeros(len(w), dtype=np.int64)
    if not is_constant:
        offset = np.float32(1e-4) if layout.is_middle else np.float32(0.5)
        codes = np.clip(np.floor((w - low) / scale + offset), 0, top).astype(np.int64)
    head = half(scale) + half(base) if layout.scale_first else half(base) + half(scale)
    return head + layout.pack([int(code) for code in codes])


def half(value: np.float32) -> bytes:
    """As float16."""
    return np.float16(value).tobytes()


def decode(name: str, block: bytes) -> Floats:
    """The weights of one block, bit by bit."""
    if name == "q8_b32t2":
        scale = np.frombuffer(block[:2], np.float16)[0].astype(np.float32)
        return np.frombuffer(block[2:], np.int8).astype(np.float32) * scale
    first, second = np.frombuffer(block[:4], np.float16).astype(np.float32)
    scale, base = (first, second) if LAYOUTS[name].scale_first else (second, first)
    codes = np.array(codes_of(name, block[4:]), dtype=np.float32)
    return codes * scale + base


def bit(data: bytes, place: int, count: int) -> int:
    """`count` bits of a string of bits, the lowest of the first byte being the first."""
    return int.from_bytes(data, "little") >> place & ((1 << count) - 1)


def codes_of(name: str, data: bytes) -> list[int]:
    """The codes behind scale and base."""
    if name == "q8_b32t1":
        return list(data)
    if name == "q5_b32t1":
        return [bit(data[4:], 8 * (i % 16) + i // 16 * 4, 4) | bit(data, i, 1) << 4 for i in range(32)]
    if name == "q3h_b64t1":
        numbers = [
            bit(data[12:], 4 * i, 4) | bit(data[4:12], 2 * i, 2) << 4 | bit(data[:4], i, 1) << 6 for i in range(32)
        ]
        return [part for number in numbers for part in (number % 11, number // 11)]
    inputs, bits = LAYOUTS[name].inputs, int(name[1])
    low = 2 if bits in (2, 3) else 4
    high, size = bits - low, inputs * (bits - low) // 8
    return [bit(data[size:], low * i, low) | (bit(data, high * i, high) << low if high else 0) for i in range(inputs)]
