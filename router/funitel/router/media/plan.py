"""How an image of some size becomes tiles and tokens: a plan, which needs no pixels.

A sandbox process draws the tiles of a plan; the router knows from the same plan what it must get.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from funitel.proto.errors import InvalidRequest

Colour = tuple[int, int, int]
BLACK: Colour = (0, 0, 0)


class Size(NamedTuple):
    """Pixels, or features, of a rectangle."""

    height: int
    width: int

    @property
    def area(self) -> int:
        """Height times width."""
        return self.height * self.width

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


class Offset(NamedTuple):
    """Where the upper left corner of an image lies on a canvas; negative where it is cropped."""

    top: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Canvas:
    """A picture that is cut into tiles, row by row.

    The image is resized to each of `resizes`, one after the other, and put on a canvas of `size`, which is black.
    With `square`, a colour, it is first put into the middle of a square of that colour.
    """

    resizes: tuple[Size, ...]
    size: Size
    offset: Offset = Offset()
    square: Colour | None = None

    @classmethod
    def whole(cls, *resizes: Size, square: Colour | None = None) -> "Canvas":
        """A canvas that the image fills."""
        return cls(resizes, resizes[-1], square=square)


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of an image, and the text that stands for it.

    Attributes:
        canvases: that the tiles are cut from, in order.
        tile: size of every tile.
        text: what replaces the marker, each run of placeholders as one.
        runs: lengths of these; their sum is the number of features.
        grid: (frames, rows, columns) of features, for models with rotary positions of three axes.
        size: height and width of the image, where the features depend on it.
    """

    canvases: tuple[Canvas, ...]
    tile: Size
    text: str = field(repr=False)
    runs: tuple[int, ...] = field(repr=False)
    grid: tuple[int, ...] = ()
    size: tuple[int, ...] = ()

    @property
    def num_tiles(self) -> int:
        """Tiles of all canvases."""
        return sum(canvas.size.area for canvas in self.canvases) // self.tile.area

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the tiles: number, height, width, channels."""
        return (self.num_tiles, *self.tile, 3)

    @property
    def num_bytes(self) -> int:
        """Of the tiles."""
        return self.num_tiles * self.tile.area * 3

    def check(self, image: Size, max_pixels: int) -> None:
        """Raise InvalidRequest where the image cannot be resized as planned.

        Args:
            image: its size.
            max_pixels: of any picture on the way.
        """
        for size in (each for canvas in self.canvases for each in (*canvas.resizes, canvas.size)):
            if min(size) < 1:
                raise InvalidRequest(f"has {image} pixels, of which this model's processor leaves {size}")
            if size.area > max_pixels:
                raise InvalidRequest(
                    f"has {image} pixels, which this model's processor resizes to {size}: at most {max_pixels} fit"
                )


@dataclass(frozen=True, slots=True)
class Call:
    """What a request says of an image: `detail` as OpenAI has it, and whether it is the request's only image."""

    detail: str = "auto"
    is_alone: bool = True

    @property
    def is_low(self) -> bool:
        """Whether few tokens are wanted."""
        return self.detail == "low"


def centre(image: Size, canvas: Size) -> Offset:
    """Where an image lies in the middle of a canvas; the extra pixel of an odd margin is on the right, or below."""
    return Offset((canvas.height - image.height) // 2, (canvas.width - image.width) // 2)


def centre_crop(image: Size, canvas: Size) -> Offset:
    """`centre` of a crop: an odd margin has its extra pixel on the left, or above."""
    return Offset(-((image.height - canvas.height) // 2), -((image.width - canvas.width) // 2))
