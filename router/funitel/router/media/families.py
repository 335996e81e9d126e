"""The table of model families that take images: which planner each has, and how the files of a model set it up.

A value that the files leave out, or have as null, is the default of transformers.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from funitel.proto.errors import StartupError, translating
from funitel.proto.step import MediaKind
from funitel.router.media.plan import Colour
from funitel.router.media.planners import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    AnyResolution,
    CentreCrop,
    DynamicTiles,
    FittedTiles,
    FixedSize,
    PatchRows,
    Planner,
    PooledPatches,
    SmartResize,
    TiledSquares,
)
from funitel.router.text.model_files import ModelFiles

logger = logging.getLogger(__name__)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How a model takes images.

    Attributes:
        planner: of its images.
        marker: what the chat template writes for an image.
        prompt_marker: what a prompt without a template has for one: the marker, and what the template has around it.
        placeholder_id: the token that takes a feature.
    """

    planner: Planner
    marker: str
    prompt_marker: str
    placeholder_id: int


class FamilyFiles:
    """The values of a model folder that say how images are processed."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        self.config = files.json("config.json")
        self.processor = files.json("processor_config.json")
        nested = self.processor.get("image_processor")
        self.image = nested if isinstance(nested, dict) else files.json("preprocessor_config.json")
        self.vision = self._part("vision_config")
        self._tokenizer = tokenizer
        self._named = files.special_tokens(tokenizer) | self._extra_tokens(files)

    def _part(self, name: str) -> dict[str, Any]:
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @staticmethod
    def _extra_tokens(files: ModelFiles) -> dict[str, str]:
        named = files.json("tokenizer_config.json").get("extra_special_tokens")
        texts = named.items() if isinstance(named, dict) else ()
        return {name: text for name, text in texts if isinstance(text, str)}

    @property
    def model_type(self) -> str:
        """Of config.json."""
        return str(self.config.get("model_type"))

    def resample(self, default: int) -> int:
        """Pillow's number of a filter."""
        return self.number(self.image, "resample", default)

    def number(self, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """A whole number of one of the files. Raises StartupError where it is none, or lacks without a default."""
        value = values.get(name)
        value = default if value is None else value
        if not isinstance(value, int):
            raise StartupError(f"the model's image processor has {name} {value!r}, which must be a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A switch of the image processor."""
        value = self.image.get(name)
        return default if value is None else bool(value)

    def size(self, name: str = "size", *, is_square: bool = True, **default: int) -> dict[str, int]:
        """A size of the image processor: `shortest_edge`, `longest_edge`, or `height` and `width`.

        Args:
            name: of the size.
            is_square: whether a number alone is both edges, and not the shortest one.
            default: where there is none.
        """
        value = self.image.get(name)
        if value is None:
            return default
        if isinstance(value, int):
            return {"height": value, "width": value} if is_square else {"shortest_edge": value}
        if isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if not (isinstance(value, dict) and all(isinstance(edge, int | None) for edge in value.values())):
            raise StartupError(f"the model's image processor has {name} {value!r}, which is no size")
        return {key: edge for key, edge in value.items() if edge is not None}

    def patch_size(self) -> int:
        """Of the vision tower, as the processor or the model says."""
        return self.number(self.processor, "patch_size", self.vision.get("patch_size"))

    def named(self, name: str, default: str | None = None) -> str:
        """The text of a token that the tokenizer or config.json names.

        Raises:
            StartupError: there is no such token.
        """
        ids = [self.config.get(f"{name}_{end}") for end in ("token_id", "token_index")]
        text = next((self._text(value) for value in ids if isinstance(value, int)), None)
        text = text or self._named.get(f"{name}_token") or default
        if text is None or self._tokenizer.token_to_id(text) is None:
            raise StartupError(f"the tokenizer has no token {text or name}, which stands for media in prompts")
        return text

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def colour(self) -> Colour:
        """The image processor's mean, as a colour."""
        mean = self.image.get("image_mean") or CLIP_MEAN
        red, green, blue = (int(value * 255) for value in mean)
        return red, green, blue

    def extra_features(self, strategy: str) -> int:
        """Features of a tile beside those of its patches: one of a class token, less one that the model leaves out."""
        given = self.processor.get("vision_feature_select_strategy") or self.config.get(
            "vision_feature_select_strategy", strategy
        )
        has_class = str(self.vision.get("model_type", "clip_vision_model")).startswith("clip")
        class_tokens = self.number(self.processor, "num_additional_image_tokens", int(has_class))
        return class_tokens - int(given == "default")


def family_of(files: ModelFiles, tokenizer: Tokenizer) -> ImageFamily | None:
    """How the model of a folder takes images; None where it takes none, or has no row.

    Raises:
        StartupError: a value of its files is not valid, or its tokenizer lacks a token.
    """
    config = files.json("config.json")
    model_type = str(config.get("model_type"))
    row = FAMILIES.get(model_type)
    if row is None or config.get("vision_config", {}) is None:
        return None
    given = FamilyFiles(files, tokenizer)
    if not given.image:
        logger.warning("images are refused: the model's folder has no preprocessor_config.json for %s", model_type)
        return None
    if not given.flag("do_resize", True):
        raise StartupError("the model's image processor has do_resize false: images of any size cannot be taken")
    with translating(lambda error: StartupError(f"the files of the model's image processor are not valid: {error!r}")):
        planner = row.planner(given)
    marker = given.named("boi") if row.marker == BOI else row.marker or planner.placeholder
    placeholder_id = tokenizer.token_to_id(planner.placeholder)
    assert placeholder_id is not None
    return ImageFamily(planner, marker, row.around.format(marker), placeholder_id)


def _tiled_squares(given: FamilyFiles) -> Planner:
    tile_edge = given.size("max_image_size", longest_edge=364)["longest_edge"]
    scale = given.number(given.config, "scale_factor", 2)
    patches = (tile_edge // given.number(given.vision, "patch_size", 14)) ** 2
    return TiledSquares(
        placeholder=given.named("image", "<image>"),
        resample=given.resample(LANCZOS),
        longest_edge=given.size(longest_edge=4 * 364)["longest_edge"],
        tile_edge=tile_edge,
        tokens_per_tile=given.number(given.processor, "image_seq_len", patches // scale**2),
        splits=given.flag("do_image_splitting", True),
    )


def _smart_resize(given: FamilyFiles) -> Planner:
    size = given.size(shortest_edge=56 * 56, longest_edge=28 * 28 * 1280)
    return SmartResize(
        placeholder=given.named("image", "<|image_pad|>"),
        resample=given.resample(BICUBIC),
        min_pixels=given.number(given.image, "min_pixels", size.get("shortest_edge")),
        max_pixels=given.number(given.image, "max_pixels", size.get("longest_edge")),
        patch_size=given.number(given.image, "patch_size", 14),
        merge_size=given.number(given.image, "merge_size", 2),
    )


def _gemma3(given: FamilyFiles) -> Planner:
    if given.flag("do_pan_and_scan", False):
        logger.warning("the model's image processor asks for pan and scan: images are processed without")
    size = given.size(height=224, width=224)
    return FixedSize(
        placeholder=given.named("image", "<image_soft_token>"),
        resample=given.resample(BILINEAR),
        height=size["height"],
        width=size["width"],
        num_features=given.number(given.processor, "image_seq_length", given.config.get("mm_tokens_per_image", 256)),
        before=f"\n\n{given.named('boi', '<start_of_image>')}",
        after=f"{given.named('eoi', '<end_of_image>')}\n\n",
    )


def _gemma4(given: FamilyFiles) -> Planner:
    return PooledPatches(
        placeholder=given.named("image", "<|image|>"),
        resample=given.resample(BICUBIC),
        patch_size=given.number(given.image, "patch_size", 16),
        pooling=given.number(given.image, "pooling_kernel_size", 3),
        max_features=given.number(given.image, "max_soft_tokens", 280),
        before=given.named("boi"),
        after=given.named("eoi"),
    )


def _llava(given: FamilyFiles) -> Planner:
    if given.vision.get("model_type") == "pixtral":
        return _patch_rows(given)
    is_siglip = str(given.image.get("image_processor_type")).startswith("Siglip")
    default = {"height": 224, "width": 224} if is_siglip else {"shortest_edge": 224}
    size = given.size(is_square=False) or default
    crop = given.size("crop_size", height=224, width=224)
    crops = given.flag("do_center_crop", not is_siglip)
    pads = given.image.get("image_processor_type") == "LlavaImageProcessor" and given.flag("do_pad", False)
    return CentreCrop(
        placeholder=given.named("image", "<image>"),
        resample=given.resample(BICUBIC),
        shortest_edge=size.get("shortest_edge"),
        size=(size["height"], size["width"]) if "height" in size else None,
        crop=(crop["height"], crop["width"]) if crops else None,
        square=given.colour() if pads else None,
        patch_size=given.patch_size(),
        extra_features=given.extra_features("default"),
    )


def _edge(size: Mapping[str, int]) -> int:
    edges = set(size.values())
    if len(edges) != 1:
        raise StartupError(f"the model's image processor has size {dict(size)}: its tiles must be squares")
    return edges.pop()


def _resolutions(given: FamilyFiles, edge: int, default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    values = given.image.get("image_grid_pinpoints") or default
    resolutions = tuple((int(height), int(width)) for height, width in values)
    if not resolutions or any(length < edge or length % edge for each in resolutions for length in each):
        raise StartupError(f"the model's image_grid_pinpoints must be multiples of the edge of its tiles, {edge}")
    return resolutions


def _llava_next(given: FamilyFiles) -> Planner:
    edge = _edge(given.size(is_square=False, shortest_edge=224))
    if given.flag("do_center_crop", True) and _edge(given.size("crop_size", height=224, width=224)) != edge:
        raise StartupError(f"the model's image processor has a crop_size that is not its size, {edge}")
    return AnyResolution(
        placeholder=given.named("image", "<image>"),
        resample=given.resample(BICUBIC),
        edge=edge,
        resolutions=_resolutions(given, edge, [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]),
        features_per_edge=edge // given.patch_size(),
        extra_features=given.extra_features("default"),
    )


def _onevision(given: FamilyFiles) -> Planner:
    edge = _edge(given.size(is_square=False, height=384, width=384))
    patches = edge // given.number(given.vision, "patch_size", 14)
    num_tokens = given.number(given.processor, "num_image_tokens", patches**2)
    aspect = str(given.processor.get("vision_aspect_ratio") or given.config.get("vision_aspect_ratio", "anyres_max_9"))
    strategy = given.processor.get("vision_feature_select_strategy")
    lengths = [edge * factor for factor in range(1, 7)]
    return AnyResolution(
        placeholder=given.named("image", "<image>"),
        resample=given.resample(BICUBIC),
        edge=edge,
        resolutions=_resolutions(given, edge, [[height, width] for height in lengths for width in lengths]),
        features_per_edge=round(num_tokens**0.5),
        extra_features=-int(strategy == "default"),
        max_tiles=int(aspect.removeprefix("anyres_max_")),
        alone_only=True,
        square=given.colour(),
    )


def _patch_rows(given: FamilyFiles) -> Planner:
    size = given.size(longest_edge=1024)
    merged = given.number(given.processor, "spatial_merge_size", given.config.get("spatial_merge_size", 1))
    longest = size.get("longest_edge")
    return PatchRows(
        placeholder=given.named("image", "[IMG]"),
        resample=given.resample(BICUBIC),
        longest_edge=(size["height"], size["width"]) if longest is None else (longest, longest),
        patch_size=given.patch_size() * merged,
        row_end=given.processor.get("image_break_token") or "[IMG_BREAK]",
        end=given.processor.get("image_end_token") or "[IMG_END]",
    )


def _internvl(given: FamilyFiles) -> Planner:
    size = given.size(height=384, width=384)
    return DynamicTiles(
        placeholder=given.named("image", "<IMG_CONTEXT>"),
        resample=given.resample(BICUBIC),
        height=size["height"],
        width=size["width"],
        features_per_tile=given.number(given.processor, "image_seq_length", given.config.get("image_seq_length", 256)),
        min_tiles=given.number(given.image, "min_patches", 1),
        max_tiles=given.number(given.image, "max_patches", 12),
        before=given.named("start_image", "<img>"),
        after=given.named("end_image", "</img>"),
    )


def _llama4(given: FamilyFiles) -> Planner:
    edge = _edge(given.size(height=336, width=336))
    ratio = given.processor.get("pixel_shuffle_ratio") or given.vision.get("pixel_shuffle_ratio") or 0.5
    return FittedTiles(
        placeholder=given.named("image", "<|patch|>"),
        resample=given.resample(BILINEAR),
        edge=edge,
        features_per_tile=(edge // given.patch_size()) ** 2 // round(1 / ratio**2),
        max_tiles=given.number(given.image, "max_patches", 16),
        enlarges=given.flag("resize_to_max_canvas", False),
    )


BOI = "the begin-of-image token"


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One family: its planner, and the marker, which is the placeholder unless it is given."""

    planner: Callable[[FamilyFiles], Planner]
    marker: str = ""
    around: str = "{}"
    kind: MediaKind = MediaKind.IMAGE


_QWEN = FamilyRow(_smart_resize, around="<|vision_start|>{}<|vision_end|>")

FAMILIES: Mapping[str, FamilyRow] = {
    "idefics3": FamilyRow(_tiled_squares),
    "smolvlm": FamilyRow(_tiled_squares),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": FamilyRow(_gemma3, marker=BOI),
    "gemma4": FamilyRow(_gemma4),
    "llava": FamilyRow(_llava),
    "llava_next": FamilyRow(_llava_next),
    "llava_onevision": FamilyRow(_onevision),
    "mistral3": FamilyRow(_patch_rows),
    "internvl": FamilyRow(_internvl),
    "llama4": FamilyRow(_llama4, marker="<|image|>"),
}
"""Rows by `model_type` of config.json."""
