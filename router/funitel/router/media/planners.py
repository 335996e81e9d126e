"""What the image processors of model families do, as plans: equal to those of transformers, but for `detail`.

A planner is a dataclass of JSON values, so that a sandbox process can be given it. `text` of a plan has one placeholder
for each run. Sources: `image_processing_pil_*.py` and `processing_*.py` of transformers 5.23.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from funitel.proto.errors import InvalidRequest
from funitel.router.media.plan import Call, Canvas, Colour, Offset, Plan, Size, centre, centre_crop

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # Pillow's numbers of filters
LOW_EDGE = 512  # pixels of an image of low detail, along an edge


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans the images of one model. `placeholder` is the text of the token that takes a feature."""

    placeholder: str
    resample: int = BICUBIC

    def plan(self, image: Size, call: Call) -> Plan:
        """Plan an image of some size.

        Raises:
            InvalidRequest: the family does not take the size; the message follows the name of the field.
        """
        raise NotImplementedError

    def variant(self, call: Call) -> str:
        """What of a call changes the plan of this family, as a key."""
        return "low" if call.is_low and self.has_low_detail else ""

    @property
    def has_low_detail(self) -> bool:
        """Whether `detail: low` changes anything."""
        return True

    def to_json(self) -> dict[str, Any]:
        """For `from_json`, in another process."""
        return {"name": type(self).__name__, "values": asdict(self)}


def from_json(value: dict[str, Any]) -> Planner:
    """Make the planner of `Planner.to_json`."""
    planner = PLANNERS[value["name"]]
    return planner(**{each.name: _tuples(value["values"][each.name]) for each in fields(planner)})


def _tuples(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class TiledSquares(Planner):
    """Idefics 3, SmolVLM: squares of an enlarged image by row and column, and one of the whole."""

    longest_edge: int
    tile_edge: int
    tokens_per_tile: int
    splits: bool = True
    fence: str = "<fake_token_around_image>"
    whole: str = "<global-img>"
    max_edge: ClassVar[int] = 4096

    def plan(self, image: Size, call: Call) -> Plan:
        """One square of low detail, or where the model's processor does not split."""
        first = self._below_maximum(self._enlarged(image))
        tile = Size(self.tile_edge, self.tile_edge)
        run, end = (self.tokens_per_tile,), f"{self.fence}{self.whole}{self.placeholder}{self.fence}"
        if call.is_low or not self.splits:
            return Plan((Canvas.whole(first, tile),), tile, end, run)
        second = self._in_tiles(first)
        rows, columns = second.height // self.tile_edge, second.width // self.tile_edge
        if rows * columns == 1:
            return Plan((Canvas.whole(first, second),), tile, end, run)
        text = "".join(
            "".join(f"{self.fence}<row_{row + 1}_col_{column + 1}>{self.placeholder}" for column in range(columns))
            + "\n"
            for row in range(rows)
        )
        canvases = (Canvas.whole(first, second), Canvas.whole(first, second, tile))
        return Plan(canvases, tile, f"{text}\n{end}", run * (rows * columns + 1))

    def _enlarged(self, image: Size) -> Size:
        """The longest edge is that of the processor, the other one is even."""
        height, width = image
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, int(self.longest_edge / ratio)
            height += height % 2
        else:
            height, width = self.longest_edge, int(self.longest_edge * ratio)
            width += width % 2
        return Size(max(height, 1), max(width, 1))

    def _below_maximum(self, size: Size) -> Size:
        height, width = size
        ratio = width / height
        if width >= height and width > self.max_edge:
            height, width = int(self.max_edge / ratio), self.max_edge
        elif height > width and height > self.max_edge:
            height, width = self.max_edge, int(self.max_edge * ratio)
        return Size(max(height, 1), max(width, 1))

    def _in_tiles(self, size: Size) -> Size:
        height, width = size
        ratio = width / height
        if width >= height:
            width = _up(width, self.tile_edge)
            height = _up(int(width / ratio), self.tile_edge)
        else:
            height = _up(height, self.tile_edge)
            width = _up(int(height * ratio), self.tile_edge)
        return Size(height, width)


@dataclass(frozen=True, kw_only=True)
class SmartResize(Planner):
    """Qwen2-VL and later: edges that are multiples of merged patches, within a minimum and a maximum of pixels."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    max_ratio: ClassVar[int] = 200

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail has as many pixels as a square of `LOW_EDGE`."""
        ratio = max(image) / min(image)
        if ratio > self.max_ratio:
            raise InvalidRequest(
                f"has {image} pixels, an aspect ratio of {ratio:.0f}: it must be at most {self.max_ratio}"
            )
        factor = self.patch_size * self.merge_size
        most = max(self.min_pixels, min(self.max_pixels, LOW_EDGE**2)) if call.is_low else self.max_pixels
        height, width = round(image.height / factor) * factor, round(image.width / factor) * factor
        if height * width > most:
            shrink = math.sqrt(image.area / most)
            height = max(factor, math.floor(image.height / shrink / factor) * factor)
            width = max(factor, math.floor(image.width / shrink / factor) * factor)
        elif height * width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / image.area)
            height = math.ceil(image.height * grow / factor) * factor
            width = math.ceil(image.width * grow / factor) * factor
        size = Size(height, width)
        rows, columns = height // factor, width // factor
        return Plan((Canvas.whole(size),), size, self.placeholder, (rows * columns,), (1, rows, columns))


@dataclass(frozen=True, kw_only=True)
class FixedSize(Planner):
    """Gemma 3: one size, between the tokens for its begin and end."""

    height: int
    width: int
    num_features: int
    before: str = ""
    after: str = ""

    @property
    def has_low_detail(self) -> bool:
        """Every image has the same size."""
        return False

    def plan(self, image: Size, call: Call) -> Plan:
        """The image is stretched."""
        size = Size(self.height, self.width)
        return Plan((Canvas.whole(size),), size, f"{self.before}{self.placeholder}{self.after}", (self.num_features,))


@dataclass(frozen=True, kw_only=True)
class PooledPatches(Planner):
    """Gemma 4: as many pooled patches as fit a number of features, at the image's aspect ratio."""

    patch_size: int
    pooling: int
    max_features: int
    before: str
    after: str
    low_features: ClassVar[int] = 70

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail has the fewest features that the family knows."""
        most = min(self.max_features, self.low_features) if call.is_low else self.max_features
        step = self.patch_size * self.pooling
        scale = math.sqrt(most * self.pooling**2 * self.patch_size**2 / image.area)
        rows, columns = math.floor(scale * image.height / step), math.floor(scale * image.width / step)
        if rows == 0:
            rows, columns = 1, min(math.floor(image.width / image.height), most)
        elif columns == 0:
            rows, columns = min(math.floor(image.height / image.width), most), 1
        size = Size(rows * step, columns * step)
        resizes = () if size == image else (size,)
        text = f"{self.before}{self.placeholder}{self.after}"
        return Plan((Canvas(resizes, size),), size, text, (rows * columns,))


@dataclass(frozen=True, kw_only=True)
class CentreCrop(Planner):
    """LLaVA with CLIP or SigLIP: the shorter edge, or both, are resized, and the middle is cropped.

    With `square` the image is first put into the middle of a square of that colour. `extra_features` are those of the
    tower's class token, less one that the model leaves out.
    """

    shortest_edge: int | None = None
    size: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    square: Colour | None = None
    patch_size: int
    extra_features: int

    @property
    def has_low_detail(self) -> bool:
        """Every image has the same size."""
        return False

    def plan(self, image: Size, call: Call) -> Plan:
        """One tile."""
        source = image if self.square is None else Size(max(image), max(image))
        resized = Size(*self.size) if self.size is not None else self._resized(source)
        tile = resized if self.crop is None else Size(*self.crop)
        canvas = Canvas((resized,), tile, centre_crop(resized, tile), self.square)
        rows, columns = tile.height // self.patch_size, tile.width // self.patch_size
        return Plan((canvas,), tile, self.placeholder, (rows * columns + self.extra_features,))

    def _resized(self, image: Size) -> Size:
        assert self.shortest_edge is not None
        longest = int(self.shortest_edge * max(image) / min(image))
        if image.width <= image.height:
            return Size(longest, self.shortest_edge)
        return Size(self.shortest_edge, longest)


@dataclass(frozen=True, kw_only=True)
class AnyResolution(Planner):
    """LLaVA-NeXT and LLaVA-OneVision: tiles of the best of some resolutions, behind one of the whole image.

    The tower's features of the margins are left out, and each row of features ends with one of the model's own.
    With `max_tiles`, features of more tiles are interpolated to so many. With `alone_only` several images of a request
    have one tile each, the image on a square of the colour `square`.
    """

    edge: int
    resolutions: tuple[tuple[int, int], ...]  # height, width
    features_per_edge: int
    extra_features: int = 0  # of the whole image's tile, less one that the model leaves out
    max_tiles: int | None = None
    alone_only: bool = False
    square: Colour = (0, 0, 0)

    @property
    def has_low_detail(self) -> bool:
        """LLaVA-NeXT has no way of less."""
        return self.alone_only

    def variant(self, call: Call) -> str:
        """Images beside others have one tile."""
        return "" if self._has_tiles(call) else "one"

    def _has_tiles(self, call: Call) -> bool:
        return not self.alone_only or (call.is_alone and not call.is_low)

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail is that of several images, where the family has such."""
        tile = Size(self.edge, self.edge)
        base = self.features_per_edge**2 + self.extra_features
        if not self._has_tiles(call):
            canvas = Canvas.whole(tile, square=self.square)
            return Plan((canvas,), tile, self.placeholder, (base + 1,), size=image)
        best = self._best(image)
        scale = min(best.width / image.width, best.height / image.height)
        if best.width / image.width < best.height / image.height:
            resized = Size(min(math.ceil(image.height * scale), best.height), best.width)
        else:
            resized = Size(best.height, min(math.ceil(image.width * scale), best.width))
        tiles = Canvas((resized,), best, centre(resized, best))
        num_features = base + self._unpadded(image, best)
        return Plan((Canvas.whole(tile), tiles), tile, self.placeholder, (num_features,), size=image)

    def _best(self, image: Size) -> Size:
        """The resolution that keeps most of the image's pixels, and of these the one that wastes fewest of its own."""
        best, kept, wasted = Size(*self.resolutions[0]), -1, 0
        for each in map(Size._make, self.resolutions):
            scale = min(each.width / image.width, each.height / image.height)
            effective = min(int(image.width * scale) * int(image.height * scale), image.area)
            if effective > kept or (effective == kept and each.area - effective < wasted):
                best, kept, wasted = each, effective, each.area - effective
        return best

    def _unpadded(self, image: Size, best: Size) -> int:
        """Features of the tiles without those of margins, and one for each row of them."""
        height = self.features_per_edge * (best.height // self.edge)
        width = self.features_per_edge * (best.width // self.edge)
        if image.width / image.height > width / height:
            inner = int(round(image.height * (width / image.width), 7))
            height -= (height - inner) // 2 * 2
        else:
            inner = int(round(image.width * (height / image.height), 7))
            width -= (width - inner) // 2 * 2
        if self.max_tiles is not None:
            excess = math.sqrt(height * width / (self.max_tiles * self.features_per_edge**2))
            if excess > 1.1:
                height, width = int(height // excess), int(width // excess)
        return height * width + height


@dataclass(frozen=True, kw_only=True)
class PatchRows(Planner):
    """Pixtral, Mistral 3: an image within a longest edge; a token ends each row of its features."""

    longest_edge: tuple[int, int]  # of height and width
    patch_size: int  # of merged patches
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail has a longest edge of `LOW_EDGE`."""
        limits = [min(edge, LOW_EDGE) if call.is_low else edge for edge in self.longest_edge]
        ratio = max(image.height / limits[0], image.width / limits[1])
        height, width = image
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (height - 1) // self.patch_size + 1, (width - 1) // self.patch_size + 1
        size = Size(rows * self.patch_size, columns * self.patch_size)
        text = self.row_end.join([self.placeholder] * rows) + self.end
        return Plan((Canvas.whole(size),), size, text, (columns,) * rows)


@dataclass(frozen=True, kw_only=True)
class DynamicTiles(Planner):
    """InternVL: tiles of the grid with the closest aspect ratio, before one of the whole image."""

    height: int
    width: int
    features_per_tile: int
    min_tiles: int = 1
    max_tiles: int = 12
    before: str = "<img>"
    after: str = "</img>"

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail has one tile."""
        tile = Size(self.height, self.width)
        canvases = [Canvas.whole(tile)]
        if self.max_tiles > 1 and not call.is_low:
            columns, rows = self._grid(image)
            if columns * rows > 1:
                canvases.insert(0, Canvas.whole(Size(rows * tile.height, columns * tile.width)))
        num_tiles = sum(canvas.size.area for canvas in canvases) // tile.area
        text = f"{self.before}{self.placeholder}{self.after}"
        return Plan(tuple(canvases), tile, text, (self.features_per_tile * num_tiles,))

    def _grid(self, image: Size) -> tuple[int, int]:
        """Columns and rows; of equal aspect ratios the largest of which the image fills half."""
        least, best = math.inf, (1, 1)
        for grid in sorted(self._grids(), key=lambda grid: grid[0] * grid[1]):
            difference = abs(image.width / image.height - grid[0] / grid[1])
            area = 0.5 * self.height * self.width * grid[0] * grid[1]
            if difference < least or (difference == least and image.area > area):
                least, best = difference, grid
        return best

    def _grids(self) -> Iterator[tuple[int, int]]:
        for columns in range(1, self.max_tiles + 1):
            for rows in range(1, self.max_tiles + 1):
                if self.min_tiles <= columns * rows <= self.max_tiles:
                    yield columns, rows


@dataclass(frozen=True, kw_only=True)
class FittedTiles(Planner):
    """Llama 4: tiles of a canvas that the image fits without distortion, and one of the whole image behind them."""

    edge: int
    features_per_tile: int
    max_tiles: int = 16
    enlarges: bool = False
    before: str = "<|image_start|>"
    whole: str = "<|image|>"
    after: str = "<|image_end|>"
    column_end: str = "<|tile_x_separator|>"
    row_end: str = "<|tile_y_separator|>"

    def plan(self, image: Size, call: Call) -> Plan:
        """Low detail has one tile."""
        tile = Size(self.edge, self.edge)
        canvas = self._canvas(image, 1 if call.is_low else self.max_tiles)
        target = canvas
        if not self.enlarges:
            target = Size(*(min(max(edge, self.edge), most) for edge, most in zip(image, canvas, strict=True)))
        resized = self._within(image, target)
        canvases = [Canvas((resized,), canvas, Offset())]
        rows, columns = canvas.height // self.edge, canvas.width // self.edge
        text = ""
        if rows * columns > 1:
            canvases.append(Canvas.whole(tile))
            text = (self.column_end.join([self.placeholder] * columns) + self.row_end) * rows
        text = f"{self.before}{text}{self.whole}{self.placeholder}{self.after}"
        num_tiles = rows * columns + (rows * columns > 1)
        return Plan(tuple(canvases), tile, text, (self.features_per_tile,) * num_tiles)

    def _canvas(self, image: Size, max_tiles: int) -> Size:
        """The canvas that takes least enlarging, or else least shrinking, and of these the smallest."""
        scaled = [
            (min(_single(size.width / image.width), _single(size.height / image.height)), size)
            for size in self._canvases(max_tiles)
        ]
        enlarging = [scale for scale, _ in scaled if scale >= 1]
        if enlarging:
            chosen = max(enlarging) if self.enlarges else min(enlarging)
        else:
            chosen = max(scale for scale, _ in scaled)
        return min((size for scale, size in scaled if scale == chosen), key=lambda size: size.area)

    def _canvases(self, max_tiles: int) -> list[Size]:
        """All of at most so many tiles, those of one aspect ratio together, with the most tiles first."""
        by_ratio: dict[float, list[Size]] = {}
        for num_tiles in range(max_tiles, 0, -1):
            for rows in range(1, num_tiles + 1):
                if num_tiles % rows == 0:
                    columns = num_tiles // rows
                    by_ratio.setdefault(rows / columns, []).append(Size(rows * self.edge, columns * self.edge))
        return [size for sizes in by_ratio.values() for size in sizes]

    @staticmethod
    def _within(image: Size, target: Size) -> Size:
        wide, high = target.width / image.width, target.height / image.height
        if wide < high:
            return Size(max(min(math.floor(image.height * wide), target.height), 1), target.width)
        return Size(target.height, max(min(math.floor(image.width * high), target.width), 1))


PLANNERS: dict[str, type[Planner]] = {
    planner.__name__: planner
    for planner in (
        TiledSquares,
        SmartResize,
        FixedSize,
        PooledPatches,
        CentreCrop,
        AnyResolution,
        PatchRows,
        DynamicTiles,
        FittedTiles,
    )
}


def _up(edge: int, step: int) -> int:
    return math.ceil(edge / step) * step


def _single(value: float) -> float:
    """Round to float32, in which the original compares."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
