"""Decode an image in a sandbox process, and draw the tiles of a plan.

Formats are told by their first bytes. Sizes are read from the header before any pixel is decoded. Metadata is dropped;
the orientation of EXIF is kept. Of an animation the first frame counts. What is transparent becomes white.
"""

import struct
from collections.abc import Iterator
from io import BytesIO

from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from funitel.proto.errors import InvalidRequest
from funitel.router.media.plan import Canvas, Plan, Size

WHITE = (255, 255, 255, 255)
MAX_EDGE = 65_535
_ORIENTATION = 0x0112  # tag of EXIF
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PLUGINS = {
    "PNG": PngImagePlugin,
    "JPEG": JpegImagePlugin,
    "WEBP": WebPImagePlugin,
    "GIF": GifImagePlugin,
    "BMP": BmpImagePlugin,
}

Image.MAX_IMAGE_PIXELS = None  # `decode` has a bound of its own


def format_of(data: bytes) -> str | None:
    """The format that the first bytes of a file announce."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "BMP" if data.startswith(b"BM") else None


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Decode an image as RGB, upright.

    Raises:
        InvalidRequest: it is no image of a known format, is damaged, or has too many pixels.
        Exception: the library's, for damaged files.
    """
    name = format_of(data)
    if name is None:
        raise InvalidRequest(f"is no image in one of the formats {', '.join(_PLUGINS)}")
    if name == "WEBP":
        _check(_webp_size(data), max_pixels)  # the library takes memory for the canvas when it opens the file
    with Image.open(BytesIO(data), formats=(name,)) as image:
        _check(Size(image.height, image.width), max_pixels)
        image.load()
        orientation = _orientation(image)
        upright = _rgb(image)
    turn = _TRANSPOSITIONS.get(orientation)
    return upright if turn is None else upright.transpose(turn)


def _check(size: Size, max_pixels: int) -> None:
    if min(size) < 1:
        raise InvalidRequest(f"is an image of {size} pixels")
    if size.area > max_pixels or max(size) > MAX_EDGE:
        raise InvalidRequest(
            f"has {size} pixels: at most {max_pixels} are taken (--max-media-pixels), and {MAX_EDGE} along an edge"
        )


def _webp_size(data: bytes) -> Size:
    """The size of the canvas, as the header says."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10 or kind not in (b"VP8X", b"VP8L", b"VP8 "):
        raise InvalidRequest("is a damaged WEBP image: its header is not valid")
    if kind == b"VP8X":
        return Size(int.from_bytes(body[7:10], "little") + 1, int.from_bytes(body[4:7], "little") + 1)
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return Size((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    return Size(int.from_bytes(body[8:10], "little") & 0x3FFF, int.from_bytes(body[6:8], "little") & 0x3FFF)


def _orientation(image: Image.Image) -> int:
    """The orientation of EXIF; 1, which is upright, where EXIF cannot be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, OSError, struct.error):
        return 1
    return found if isinstance(found, int) else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparent pixels are put on white, as the processors of transformers do."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, WHITE), rgba).convert("RGB")


def tiles(image: Image.Image, plan: Plan, resample: int) -> Iterator[bytes]:
    """Draw the tiles of a plan: uint8 [height, width, 3] each."""
    last: tuple[tuple[Size, ...], Image.Image] = ((), image)
    for canvas in plan.canvases:
        drawn, last = _drawn(image, canvas, resample, last)
        for top in range(0, canvas.size.height, plan.tile.height):
            for left in range(0, canvas.size.width, plan.tile.width):
                yield drawn.crop((left, top, left + plan.tile.width, top + plan.tile.height)).tobytes()


def _drawn(
    image: Image.Image, canvas: Canvas, resample: int, last: tuple[tuple[Size, ...], Image.Image]
) -> tuple[Image.Image, tuple[tuple[Size, ...], Image.Image]]:
    """Draw a canvas; what the last one was resized to is taken where this one begins with the same sizes."""
    done: tuple[Size, ...] = ()
    resized = image
    if canvas.square is not None:
        edge = max(image.size)
        resized = Image.new("RGB", (edge, edge), canvas.square)
        resized.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
    elif last[0] == canvas.resizes[: len(last[0])]:
        done, resized = last
    for height, width in canvas.resizes[len(done) :]:
        resized = resized.resize((width, height), Image.Resampling(resample))
    kept = (canvas.resizes, resized) if canvas.square is None else ((), image)
    if canvas.offset == (0, 0) and resized.size == (canvas.size.width, canvas.size.height):
        return resized, kept
    drawn = Image.new("RGB", (canvas.size.width, canvas.size.height))
    drawn.paste(resized, (canvas.offset.left, canvas.offset.top))
    return drawn, kept
