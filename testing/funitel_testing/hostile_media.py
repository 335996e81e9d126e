"""Damaged pictures and sounds, each made of a kind, a seed and a number, and small files that stand for large things.

PNG's checksums are made to fit again in part of its mutants, so that these get past the first check.
"""

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from funitel_testing.fuzz_mutants import HUGE, damaged
from funitel_testing.sound_files import flac, silent_mp3, wav
from funitel_testing.vision_models import picture
from funitel_testing.whisper_models import sound

PICTURE_KINDS = ("png", "jpeg", "webp", "gif")
SOUND_KINDS = ("wav", "flac", "mp3")
MIME = {kind: f"image/{kind}" for kind in PICTURE_KINDS} | {kind: f"audio/{kind}" for kind in SOUND_KINDS}


def url_of(content: bytes, mime: str = "image/png") -> str:
    """A data URL."""
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def mutant(kind: str, seed: int, number: int) -> bytes:
    """One damaged file."""
    rng = random.Random(f"{kind} {seed} {number}")
    content = rng.choice(_bases(kind))
    for _ in range(rng.choice((1, 1, 2, 5))):
        if kind == "png" and rng.random() < 0.6:
            content = _with_changed_chunk(content, rng)
        elif rng.random() < 0.3:
            content = _with_number(content, rng)
        else:
            content = damaged(content, rng, rng.choice((32, 200, None)))
    return content


@lru_cache
def _bases(kind: str) -> tuple[bytes, ...]:
    if kind in SOUND_KINDS:
        return _sounds(kind)
    image = picture(60, 45)
    forms: dict[str, tuple[tuple[Image.Image, dict[str, Any]], ...]] = {
        "png": (
            (image, {}),
            (image.convert("P"), {"transparency": 3}),
            (image.convert("RGBA"), {"icc_profile": b"x" * 200}),
            (image.convert("L").convert("I;16"), {}),
            (image.convert("1"), {"exif": _exif(image)}),
            (image, {"save_all": True, "append_images": [picture(60, 45, 1)]}),
        ),
        "jpeg": (
            (image, {}),
            (image, {"progressive": True, "subsampling": 0}),
            (image.convert("CMYK"), {}),
            (image.convert("L"), {"exif": _exif(image)}),
        ),
        "webp": (
            (image, {}),
            (image.convert("RGBA"), {"lossless": True}),
            (image, {"save_all": True, "append_images": [picture(60, 45, 1)]}),
        ),
        "gif": (
            (image.convert("P"), {}),
            (image.convert("P"), {"save_all": True, "append_images": [picture(60, 45, 1).convert("P")], "loop": 0}),
        ),
    }
    return tuple(_saved(each, kind, **how) for each, how in forms[kind])


def _sounds(kind: str) -> tuple[bytes, ...]:
    samples = sound(0.5)
    if kind == "flac":
        return (flac(samples), flac(samples[:3000], 44100, 192))
    if kind == "mp3":
        return (silent_mp3(12), b"ID3\x04\0\0\0\0\0\x10" + bytes(16) + silent_mp3(6))
    stereo = np.stack([samples, -samples], 1)
    return (*(wav(samples, kind=form) for form in ("int16", "uint8", "int24", "float32")), wav(stereo, 44100))


def _saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind.upper(), **how)
    return file.getvalue()


def _exif(image: Image.Image) -> bytes:
    exif = image.getexif()
    exif[274] = 6  # turned
    exif[270] = "a description"
    return exif.tobytes()


def _with_number(content: bytes, rng: random.Random) -> bytes:
    """A number of two or four bytes in one of both orders is another one."""
    kind = rng.choice((">H", "<H", ">I", "<I"))
    size = struct.calcsize(kind)
    at = rng.randrange(max(1, min(len(content) - size, rng.choice((40, 400, 1 << 30)))))
    return content[:at] + struct.pack(kind, rng.choice(HUGE) % (1 << (8 * size))) + content[at + size :]


def _with_changed_chunk(content: bytes, rng: random.Random) -> bytes:
    """A PNG of which one chunk is changed, doubled, moved or gone, with checksums that fit."""
    chunks = list(_chunks(content))
    if not chunks:
        return damaged(content, rng)
    place = rng.randrange(len(chunks))
    name, data = chunks[place]
    match rng.randrange(6):
        case 0:
            chunks[place] = (rng.choice(chunks)[0], data)
        case 1:
            chunks.insert(rng.randrange(len(chunks) + 1), (name, data))
        case 2:
            del chunks[place]
        case 3:
            chunks[place] = (name, _with_number(data, rng) if len(data) > 4 else rng.randbytes(4))
        case _:
            chunks[place] = (name, damaged(data, rng))
    return png_of(chunks)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 12 <= len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        if at + 12 + size > len(content):
            return
        yield content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        at += 12 + size


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A PNG file of named chunks."""
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def blank_png(width: int, height: int, *more: tuple[bytes, bytes], depth: int = 1, kind: int = 0) -> bytes:
    """A PNG of one colour, as small as it can be; `more` are chunks behind the header."""
    samples = {0: 1, 2: 3, 6: 4}[kind]
    row = bytes(1 + (width * depth * samples + 7) // 8)
    packer = zlib.compressobj(9)
    rows = max(1, (1 << 20) // len(row))
    data = b""
    for begin in range(0, height, rows):
        data += packer.compress(row * min(rows, height - begin))
    data += packer.flush()
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return png_of([(b"IHDR", head), *more, (b"IDAT", data), (b"IEND", b"")])


def many_framed_gif(frames: int, width: int = 1, height: int = 1) -> bytes:
    """A GIF of equal frames, of which each says that it fills a screen of this size."""
    screen = struct.pack("<HH", width, height) + bytes([0x80, 0, 0]) + bytes(6)
    frame = b"\x21\xf9\x04" + bytes(4) + b"\0" + b"\x2c" + bytes(4) + struct.pack("<HH", width, height) + b"\0"
    frame += b"\x02\x02\x44\x01\0"
    return b"GIF89a" + screen + frame * frames + b"\x3b"


def _packed_text(name: bytes, megabytes: int) -> tuple[bytes, bytes]:
    """A compressed chunk of text or colours that unpacks to many zeros."""
    return name, b"x\0\0" + zlib.compress(bytes(megabytes << 20), 9)


def _jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose header says another size than its data has."""
    content = bytearray(_saved(picture(16, 16), "jpeg"))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(content)


BOMBS: dict[str, Callable[[], tuple[bytes, str]]] = {
    "30,000 x 30,000 pixels": lambda: (blank_png(30_000, 30_000), "image/png"),
    "30,000 x 30,000 pixels of 64 bits, by the header": lambda: (
        png_of(
            [(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 16, 6, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9)))]
        ),
        "image/png",
    ),
    "2^31 - 1 pixels each way": lambda: (
        png_of([(b"IHDR", struct.pack(">IIBBBBB", (1 << 31) - 1, (1 << 31) - 1, 8, 2, 0, 0, 0))]),
        "image/png",
    ),
    "a packed text of 200 MB": lambda: (blank_png(8, 8, _packed_text(b"zTXt", 200)), "image/png"),
    "packed colours of 200 MB": lambda: (blank_png(8, 8, _packed_text(b"iCCP", 200)), "image/png"),
    "100 packed texts": lambda: (blank_png(8, 8, *[_packed_text(b"zTXt", 4)] * 100), "image/png"),
    "30,000 frames": lambda: (many_framed_gif(30_000), "image/gif"),
    "a screen of 65,535 x 65,535": lambda: (many_framed_gif(1, 65_535, 65_535), "image/gif"),
    "200 frames of 8,000 x 8,000": lambda: (many_framed_gif(200, 8_000, 8_000), "image/gif"),
    "a JPEG of 65,500 x 65,500": lambda: (_jpeg_of(65_500, 65_500), "image/jpeg"),
    "a canvas of 16,777,216 x 16,777,216": lambda: (
        b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0]) + b"\xff" * 6,
        "image/webp",
    ),
}
"""Small files that are large pictures, or long ones: name -> content and kind."""

NARROW: dict[str, Callable[[], bytes]] = {
    "1 x 65,535 pixels": lambda: blank_png(1, 65_535, depth=8, kind=2),
    "65,535 x 1 pixels": lambda: blank_png(65_535, 1, depth=8, kind=2),
    "1 x 1 pixels": lambda: blank_png(1, 1),
}
"""Whole pictures of unusual shapes."""

SOUND_BOMBS: dict[str, Callable[[], bytes]] = {
    "a WAV that says 4 GB": lambda: _wav_saying(0xFFFFFFFF, 16000, 1),
    "a WAV of 65,535 channels": lambda: _wav_saying(4000, 16000, 65_535),
    "a WAV of rate 0": lambda: _wav_saying(4000, 0, 1),
    "a WAV of one sample a second, a day long": lambda: wav(np.zeros(86_400, np.float32), 1),
    "a WAV of 4,294,967,295 samples a second": lambda: _wav_saying(4000, 0xFFFFFFFF, 1),
    "a WAV without samples": lambda: wav(np.zeros(0, np.float32)),
    "a FLAC that says 2^36 - 1 samples": lambda: _flac_saying((1 << 36) - 1),
    "an MP3 without frames": lambda: b"ID3\x04\0\0\0\0\0\x10" + bytes(16),
    "an MP3 with a tag of 256 MB": lambda: b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(500),
    "samples that are no numbers": lambda: wav(np.full(16_000, np.nan, np.float32), kind="float32"),
    "samples that are infinite": lambda: wav(np.full(16_000, np.inf, np.float32), kind="float32"),
}
"""Sounds that say more than they hold, or hold what no sound does."""


def _wav_saying(size: int, rate: int, channels: int) -> bytes:
    content = bytearray(wav(sound(0.2)))
    content[22:28] = struct.pack("<HI", channels, rate)
    content[40:44] = struct.pack("<I", size)
    return bytes(content)


def _flac_saying(samples: int) -> bytes:
    content = bytearray(flac(sound(0.2)))
    word = int.from_bytes(content[18:26], "big")
    content[18:26] = ((word >> 36 << 36) | samples).to_bytes(8, "big")
    return bytes(content)
