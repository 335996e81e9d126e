"""The vision families: which model of transformers has the tower, how tiles go into it, and how features come out."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from funitel.model_server.media.families.pixels import CLIP, HALF, NONE, Statistics
from funitel.model_server.media.interface import MediaFeatures
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput

Model = Any  # a model of transformers without its text
Inputs = dict[str, Any]  # arguments of `get_image_features`


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRow:
    """A family.

    `model` is the class in transformers, of which the parts `left_out` are dropped. `inputs` makes what
    `get_image_features` takes of pixels [n, 3, height, width]; `features` makes [num_features, hidden_size] of its
    output. `inputs` of images of one size may be concatenated where it `has_batches`. `has_axes`, `has_whole_spans`:
    see `MediaEncoder`.
    """

    model: str
    left_out: tuple[str, ...] = ("language_model",)
    inputs: Callable[[Model, torch.Tensor, MediaInput], Inputs]
    features: Callable[[Model, Any], MediaFeatures]
    statistics: Statistics = CLIP
    normalises: bool = True
    has_axes: bool = False
    has_batches: bool = True
    has_whole_spans: Callable[[Any], bool] = field(default=lambda config: False)


def _tiles(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """Tiles of the one size that the tower takes."""
    size = model.config.vision_config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if media.shape[1:3] != (height, width):
        raise InvalidRequest(
            f"shape must have tiles of {height} x {width}, given {media.shape[1]} x {media.shape[2]}", "shape"
        )
    return {"pixel_values": pixels}


def _square_tiles(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """Square tiles, of the size that the tower takes at most."""
    height, width = media.shape[1:3]
    size = model.config.vision_config.image_size
    _check_multiple(media, _patch_size(model) * model.config.scale_factor)
    if height != width or height > size:
        raise InvalidRequest(f"shape must have square tiles of {size} at most, given {height} x {width}", "shape")
    return {"pixel_values": pixels[None]}


def _sized(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """The tiles of an image that was cut, with the size that it had before."""
    size, config = _size_of(media), model.config
    number_of = vars(sys.modules[type(model).__module__])["image_size_to_num_patches"]
    count = number_of(size, config.image_grid_pinpoints, config.vision_config.image_size)
    if len(pixels) != count:
        raise InvalidRequest(
            f"shape must have {count} tiles for an image of {size[0]} x {size[1]}, given {len(pixels)}", "shape"
        )
    return _tiles(model, pixels, media) | {"image_sizes": torch.tensor([size])}


def _sized_or_single(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """The same; one tile is an image that was not cut, as there are several in a prompt."""
    if len(pixels) > 1:
        return _sized(model, pixels, media)
    sizes = torch.tensor([_size_of(media)])
    return _tiles(model, pixels, media) | {"image_sizes": sizes, "batch_num_images": torch.tensor([2])}


def _one_of_its_size(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """An image as it is, of which rows and columns of patches are counted."""
    _check_single(media)
    _check_multiple(media, _patch_size(model) * getattr(model.config, "spatial_merge_size", 1))
    return {"pixel_values": pixels, "image_sizes": torch.tensor([pixels.shape[-2:]])}


def _tiles_or_sized(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """LLaVA: with a Pixtral tower images have sizes of their own."""
    is_pixtral = model.config.vision_config.model_type == "pixtral"
    return (_one_of_its_size if is_pixtral else _tiles)(model, pixels, media)


def _patches_with_grid(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """Qwen: patches in the order in which they are merged, each repeated for the frames that one takes."""
    config = model.config.vision_config
    size, merge, frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
    _check_single(media)
    _check_multiple(media, size * merge)
    channels, height, width = pixels.shape[1:]
    rows, columns = height // size, width // size
    if media.grid != (1, rows // merge, columns // merge):
        raise InvalidRequest(
            f"grid must be {[1, rows // merge, columns // merge]} for an image of {height} x {width}, "
            f"given {list(media.grid)}",
            "grid",
        )
    cut = pixels[0].reshape(channels, rows // merge, merge, size, columns // merge, merge, size)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    patches = patches.expand(*patches.shape[:5], frames, size, size).reshape(rows * columns, -1)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _patches_with_places(model: Model, pixels: torch.Tensor, media: MediaInput) -> Inputs:
    """Gemma 4: patches with their columns and rows; features are the means of squares of patches."""
    config = model.config.vision_config
    size = config.patch_size
    _check_single(media)
    _check_multiple(media, size * config.pooling_kernel_size)
    channels, height, width = pixels.shape[1:]
    rows, columns = height // size, width // size
    if max(rows, columns) > config.position_embedding_size:
        raise InvalidRequest(f"shape must have at most {config.position_embedding_size} patches a side", "shape")
    patches = pixels[0].reshape(channels, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1)
    return {"pixel_values": patches[None], "image_position_ids": places.reshape(1, -1, 2)}


def _size_of(media: MediaInput) -> tuple[int, int]:
    if len(media.size) != 2 or not all(media.size):
        raise InvalidRequest(f"size must be a height and a width, given {list(media.size)}", "size")
    return media.size[0], media.size[1]


def _patch_size(model: Model) -> int:
    size: int = model.config.vision_config.patch_size
    return size


def _check_single(media: MediaInput) -> None:
    if media.shape[0] != 1:
        raise InvalidRequest(f"shape must have 1 tile for this model, given {media.shape[0]}", "shape")


def _check_multiple(media: MediaInput, unit: int) -> None:
    height, width = media.shape[1:3]
    if height % unit or width % unit:
        raise InvalidRequest(f"shape must have sides that are multiples of {unit}, given {height} x {width}", "shape")


def _pooled(model: Model, output: Any) -> MediaFeatures:
    """The features of all tiles, one after the other."""
    found = output.pooler_output
    parts = found if isinstance(found, list | tuple) else [found]
    return MediaFeatures(torch.cat([each.reshape(-1, each.shape[-1]) for each in parts]))


def _with_deep(model: Model, output: Any) -> MediaFeatures:
    deep = [torch.cat(list(each)) for each in output.deepstack_features]
    return MediaFeatures(_pooled(model, output).features, tuple(deep))


def _projected(model: Model, output: Any) -> MediaFeatures:
    """Llama 4: the projector is apart from the tower."""
    hidden = output.last_hidden_state
    return MediaFeatures(model.multi_modal_projector(hidden.reshape(-1, hidden.shape[-1])))


def _idefics(model: str) -> TowerRow:
    return TowerRow(model=model, left_out=("text_model",), inputs=_square_tiles, features=_pooled, statistics=HALF)


def _qwen(model: str, features: Callable[[Model, Any], MediaFeatures] = _pooled) -> TowerRow:
    return TowerRow(model=model, inputs=_patches_with_grid, features=features, has_axes=True)


FAMILIES: Mapping[str, TowerRow] = {
    "Idefics3ForConditionalGeneration": _idefics("Idefics3Model"),
    "SmolVLMForConditionalGeneration": _idefics("SmolVLMModel"),
    "Qwen2VLForConditionalGeneration": _qwen("Qwen2VLModel"),
    "Qwen2_5_VLForConditionalGeneration": _qwen("Qwen2_5_VLModel"),
    "Qwen3VLForConditionalGeneration": _qwen("Qwen3VLModel", _with_deep),
    "Qwen3VLMoeForConditionalGeneration": _qwen("Qwen3VLMoeModel", _with_deep),
    "Qwen3_5ForConditionalGeneration": _qwen("Qwen3_5Model"),
    "Qwen3_5MoeForConditionalGeneration": _qwen("Qwen3_5MoeModel"),
    "Gemma3ForConditionalGeneration": TowerRow(
        model="Gemma3Model",
        inputs=_tiles,
        features=_pooled,
        statistics=HALF,
        has_whole_spans=lambda config: True,
    ),
    "Gemma4ForConditionalGeneration": TowerRow(
        model="Gemma4Model",
        left_out=("language_model", "audio_tower", "embed_audio"),
        inputs=_patches_with_places,
        features=_pooled,
        statistics=NONE,
        normalises=False,
        has_whole_spans=lambda config: config.text_config.use_bidirectional_attention == "vision",
    ),
    "LlavaForConditionalGeneration": TowerRow(model="LlavaModel", inputs=_tiles_or_sized, features=_pooled),
    "LlavaNextForConditionalGeneration": TowerRow(model="LlavaNextModel", inputs=_sized, features=_pooled),
    "LlavaOnevisionForConditionalGeneration": TowerRow(
        model="LlavaOnevisionModel", inputs=_sized_or_single, features=_pooled, has_batches=False
    ),
    "Mistral3ForConditionalGeneration": TowerRow(model="Mistral3Model", inputs=_one_of_its_size, features=_pooled),
    "InternVLForConditionalGeneration": TowerRow(model="InternVLModel", inputs=_tiles, features=_pooled),
    "Llama4ForConditionalGeneration": TowerRow(
        model="Llama4ForConditionalGeneration", inputs=_tiles, features=_projected, statistics=HALF
    ),
}
"""By the architecture that config.json names."""
