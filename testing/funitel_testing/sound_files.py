"""Sounds as files: WAV in several forms, FLAC with samples as they are, and MP3 of silence."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_PCM, _FLOAT = 1, 3


def wav(samples: np.ndarray, rate: int = 16000, kind: str = "int16") -> bytes:
    """A WAV file of samples [count] or [count, channels] between -1 and 1; `kind` is how each is written."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    flat = samples.reshape(-1).astype(np.float64)
    if kind == "uint8":
        data, width = (np.round(flat * 127) + 128).astype(np.uint8).tobytes(), 1
    elif kind == "int24":
        wide = np.round(flat * (1 << 23)).clip(-(1 << 23), (1 << 23) - 1).astype("<i4")
        data, width = wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), 3
    elif kind == "float32":
        data, width = flat.astype("<f4").tobytes(), 4
    else:
        data, width = _int16(flat).astype("<i2").tobytes(), 2
    code = _FLOAT if kind == "float32" else _PCM
    size = channels * width
    form = struct.pack("<HHIIHH", code, channels, rate, rate * size, size, 8 * width)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _int16(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32768).clip(-32768, 32767).astype(np.int64)


def flac(samples: np.ndarray, rate: int = 16000, block: int = 4096) -> bytes:
    """A FLAC file of one channel [count] between -1 and 1, 16 bits a sample, none of them predicted."""
    values = _int16(samples.astype(np.float64))
    info = struct.pack(">HH", block, block) + bytes(6)
    info += ((rate << 44) | (0 << 41) | (15 << 36) | len(values)).to_bytes(8, "big") + bytes(16)
    file = b"fLaC" + bytes([0x80]) + len(info).to_bytes(3, "big") + info
    for number, begin in enumerate(range(0, len(values), block)):
        file += _flac_frame(values[begin : begin + block], number)
    return file


def _flac_frame(values: np.ndarray, number: int) -> bytes:
    """Sizes are written at the end of the header; the rate is that of the file."""
    head = bytes([0xFF, 0xF8, 0x70, 0x08]) + _as_utf8(number) + struct.pack(">H", len(values) - 1)
    head += bytes([_crc(head, 0x07, 8)])
    frame = head + bytes([0x02]) + values.astype(">i2").tobytes()  # a subframe of samples as they are
    return frame + struct.pack(">H", _crc(frame, 0x8005, 16))


def _as_utf8(number: int) -> bytes:
    return chr(number).encode("utf-8", "surrogatepass")


def _crc(content: bytes, polynomial: int, bits: int) -> int:
    table = _crc_table(polynomial, bits)
    value, shift, mask = 0, bits - 8, (1 << bits) - 1
    for byte in content:
        value = ((value << 8) & mask) ^ table[(value >> shift) ^ byte]
    return value


_TABLES: dict[tuple[int, int], list[int]] = {}


def _crc_table(polynomial: int, bits: int) -> list[int]:
    if (polynomial, bits) not in _TABLES:
        table = []
        for byte in range(256):
            value = byte << (bits - 8)
            for _ in range(8):
                value = (value << 1) ^ polynomial if value >> (bits - 1) else value << 1
                value &= (1 << bits) - 1
            table.append(value)
        _TABLES[polynomial, bits] = table
    return _TABLES[polynomial, bits]


def silent_mp3(frames: int = 40) -> bytes:
    """An MP3 file of `frames` frames of silence, 24 ms each: 48 kHz, 128 kbit/s, one channel."""
    return (bytes([0xFF, 0xFB, 0x94, 0xC4]) + bytes(384 - 4)) * frames


def fields_of(**fields: Any) -> dict[str, Any]:
    """Fields of a form; lists stand under a name with brackets, as OpenAI's client writes them."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            found[f"{name}[]"] = list(value)
        else:
            found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
