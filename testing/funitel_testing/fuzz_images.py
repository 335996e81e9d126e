"""Damaged and hostile images: processed, or refused by one clear line, in bounded time; the service goes on.

Kind: `images`. A worker of `fuzz`.
"""

import json
import random
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from funitel.proto.errors import MAX_CHARACTERS, InvalidRequest
from funitel.proto.step import MediaKind
from funitel.router.media.interface import MediaSource
from funitel.router.media.service import MediaService
from funitel.router.settings import RouterSettings
from funitel.router.text.model_files import ModelFiles
from funitel_testing import fuzz_inputs
from funitel_testing.fuzz_inputs import Try

PLACE = "messages[0].content[0].image_url"
MAX_SECONDS = 15.0  # for an input: starting a process beside others, and decoding
MAX_PIXELS = 4_000_000
SOUND_EVERY = 25  # inputs, after which a sound image must be processed as before
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "smolvlm": (
        {"model_type": "smolvlm", "image_token_id": 1},
        {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 128}},
        "<image>",
    ),
    "qwen2_vl": (
        {"model_type": "qwen2_vl", "image_token_id": 1},
        {"min_pixels": 3136, "max_pixels": 100_352},
        "<|image_pad|>",
    ),
}
EXTREMES = (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x01")
PNG_HEAD = b"\x89PNG\r\n\x1a\n"
HEADS = (
    PNG_HEAD,
    b"\xff\xd8\xff\xe0",
    b"GIF89a",
    b"RIFF\xff\xff\xff\x7fWEBPVP8X",
    b"RIFF\x10\x00\x00\x00WEBP",
    b"BM",
    b"",
)


def corpus() -> list[bytes]:
    """Sound files of all formats and modes."""
    rng = random.Random(0)
    noise = Image.frombytes("RGB", (61, 43), rng.randbytes(61 * 43 * 3))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    files: list[bytes] = []

    def add(image: Image.Image, kind: str, **options: Any) -> None:
        file = BytesIO()
        image.save(file, kind, **options)
        files.append(file.getvalue())

    alpha = noise.convert("RGBA")
    alpha.putalpha(noise.convert("L"))
    for mode in ("RGB", "L", "1", "P", "LA", "RGBA", "I;16"):
        add((alpha if "A" in mode else noise.convert("L") if mode == "I;16" else noise).convert(mode), "PNG")
    add(noise, "PNG", exif=exif, icc_profile=bytes(200), dpi=(72, 72))
    for options in ({}, {"progressive": True}, {"exif": exif}, {"quality": 5, "subsampling": 2}):
        add(noise, "JPEG", **options)
    add(noise.convert("CMYK"), "JPEG")
    add(noise.convert("L"), "JPEG")
    for options in ({}, {"lossless": True}, {"save_all": True, "append_images": [noise.transpose(3)]}, {"exif": exif}):
        add(noise, "WEBP", **options)
    add(alpha, "WEBP")
    add(noise.quantize(32), "GIF", save_all=True, append_images=[noise.rotate(90).quantize(8)])
    add(noise.quantize(4), "GIF", transparency=1, interlace=1)
    for mode in ("RGB", "P", "1"):
        add(noise.convert(mode), "BMP")
    add(noise, "PNG", save_all=True, append_images=[noise.rotate(90)])
    return files


FILES = corpus()


def mutant(rng: random.Random) -> bytes:
    """A file with some damage; half of the PNG files have right checksums again."""
    data = bytearray(rng.choice(FILES))
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 16, 200))
        near_head = rng.randrange(min(len(data), 64) + 1)
        place = rng.choice((place, near_head))
        match rng.randrange(8):
            case 0:
                data[place : place + length] = rng.randbytes(length)
            case 1:
                data = data[:place]
            case 2:
                data[place:place] = rng.randbytes(length)
            case 3:
                del data[place : place + length]
            case 4:
                data[place : place + 4] = rng.choice(EXTREMES)
            case 5:
                data[place : place + 1] = bytes([data[place] ^ 1 << rng.randrange(8)]) if place < len(data) else b""
            case 6:
                other = rng.choice(FILES)
                data[place:] = other[rng.randrange(len(other)) :]
            case _:
                data[place:place] = data[place : place + length] * rng.choice((1, 3, 100))
    if rng.random() < 0.03:
        data = bytearray(rng.choice(HEADS) + rng.randbytes(rng.choice((0, 3, 40, 3000))))
    if data.startswith(PNG_HEAD) and rng.random() < 0.5:
        return PNG_HEAD + b"".join(_checked(bytes(data[len(PNG_HEAD) :])))
    return bytes(data)


def _checked(chunks: bytes) -> Iterator[bytes]:
    """Chunks of a PNG file with right checksums."""
    while len(chunks) >= 12:
        end = 8 + int.from_bytes(chunks[:4], "big")
        body = chunks[4:end]
        yield chunks[:4] + body + zlib.crc32(body).to_bytes(4, "big")
        chunks = chunks[end + 4 :]
    yield chunks


class Images:
    """Services of two families, and what a sound image becomes."""

    def __init__(self, folder: Path) -> None:
        self._services = [_service(folder / name, *files) for name, files in FAMILIES.items()]
        self._sound: dict[int, bytes] = {}
        self._tried = 0

    async def images(self, rng: random.Random) -> str:
        """Process a damaged image."""
        service = rng.choice(self._services)
        self._tried += 1
        if self._tried % SOUND_EVERY == 1:
            for index, each in enumerate(self._services):
                [item] = await each.prepare([_source(FILES[self._tried % 7])], bytes([self._tried % 251]))
                [again] = await each.prepare([_source(FILES[0])], bytes([self._tried % 251]))
                if self._sound.setdefault(index, again.input.key) != again.input.key or not item.input.values:
                    return "another result for a sound image"
        began = time.monotonic()
        try:
            [item] = await service.prepare([_source(mutant(rng))], b"")
        except InvalidRequest as error:
            if "\n" in error.message or not error.message.isprintable() or len(error.message) > MAX_CHARACTERS + 3:
                return "not one printable line"
            if error.param != PLACE or f"`{PLACE}`" not in error.message:
                return f"an error without its field: {error.message}"
        else:
            tiles, height, width, channels = item.input.shape
            if len(item.input.values) != tiles * height * width * channels or sum(item.runs) != item.input.num_features:
                return f"another size: {item.input.shape}"
        seconds = time.monotonic() - began
        return f"no end in time: {seconds:.1f} s" if seconds > MAX_SECONDS else ""

    async def close(self) -> None:
        """End all processes."""
        for service in self._services:
            await service.close()


def _source(data: bytes) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, PLACE, data=data)


def _service(folder: Path, config: dict[str, Any], image: dict[str, Any], token: str) -> MediaService:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True)])
    settings = RouterSettings(validation_workers=1, max_media_pixels=MAX_PIXELS, media_processed_cache_mb=0)
    service = MediaService.create(settings, ModelFiles(folder), tokenizer)
    assert service is not None
    return service


@asynccontextmanager
async def prepare(folder: Path) -> AsyncIterator[Mapping[str, Try]]:
    """Start what processes the images."""
    made = Images(folder)
    try:
        yield {"images": made.images}
    finally:
        await made.close()


if __name__ == "__main__":
    fuzz_inputs.run(prepare)
