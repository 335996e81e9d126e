"""What transformers makes of images and text, family by family, without a hub and without torchvision.

An oracle has the files of a small model, and says of an image the uint8 tiles, and the text that stands for it.
"""

import ast
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

RAW = {"do_rescale": False, "do_normalize": False}
TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>"),
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|image>", "<image|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)


def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, two merged line ends, and every family's tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "\u010a\u010a"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("\u010a", "\u010a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in TOKENS])
    return made


TOKENIZER = tokenizer()


def token(text: str) -> int:
    found = TOKENIZER.token_to_id(text)
    assert found is not None
    return found


@dataclass(frozen=True)
class Oracle:
    """One family, as a small model has it.

    `process` makes the inputs of some images of one request; `tiles` are those of one of them, as uint8 arrays.
    """

    config: dict[str, Any]
    image: Any  # the image processor of transformers
    processor: type
    attributes: dict[str, Any]
    marker: str
    processor_config: dict[str, Any] = field(default_factory=dict)
    process: Callable[["Oracle", Sequence[Image.Image]], dict[str, Any]] = lambda self, images: dict(
        self.image.preprocess(list(images), **RAW)
    )
    tiles: Callable[["Oracle", dict[str, Any], int], Any] = lambda self, inputs, index: inputs["pixel_values"][index]

    def write(self, folder: Path) -> None:
        """Write the files of the model."""
        image = json.loads(self.image.to_json_string())
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "processor_config.json").write_text(json.dumps(self.processor_config))
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        TOKENIZER.save(str(folder / "tokenizer.json"))

    def texts(self, inputs: dict[str, Any], count: int) -> list[str]:
        """What stands for each image."""
        made = object.__new__(self.processor)
        made.__dict__.update(self.attributes, image_processor=self.image)
        return [self.processor.replace_image_token(made, inputs, index) for index in range(count)]  # type: ignore[attr-defined]


def channels_last(values: Any) -> np.ndarray:
    """Tiles [n, 3, height, width], or one, as uint8 [n, height, width, 3]."""
    array = np.asarray(values)
    array = array[None] if array.ndim == 3 else array
    assert np.array_equal(array, array.astype(np.uint8))
    return array.astype(np.uint8).transpose(0, 2, 3, 1)


def sources(module: str) -> dict[str, Any]:
    """The functions and methods of a file of transformers that cannot be imported, with what they need."""
    path = Path(transformers.__file__).parent / module
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    namespace: dict[str, Any] = {"math": math, "torch": torch, "defaultdict": defaultdict, "SizeDict": SimpleNamespace}
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args + ([node.args.kwarg] if node.args.kwarg else []):
            argument.annotation = None
        if node.name != "__init__":
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
    return namespace


# Idefics 3 and SmolVLM.


def nested(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(self.image.preprocess([list(images)], return_row_col_info=True, **RAW))


def split(self: Oracle, inputs: dict[str, Any], index: int) -> np.ndarray:
    counts = [max(rows * columns, 0) + 1 for rows, columns in zip(inputs["rows"][0], inputs["cols"][0], strict=True)]
    begin = sum(counts[:index])
    return channels_last(inputs["pixel_values"][0][begin : begin + counts[index]])


def idefics(image: Any, processor: type, model_type: str) -> Oracle:
    attributes = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_tag": "<global-img>",
        "global_image_token": "<global-img>",
        "image_seq_len": 7,
    }
    config = {"model_type": model_type, "image_token_id": token("<image>")}
    return Oracle(config, image, processor, attributes, "<image>", {"image_seq_len": 7}, nested, split)


# Qwen.


def patches(self: Oracle, inputs: dict[str, Any], index: int) -> np.ndarray:
    counts = [int(np.prod(grid)) for grid in inputs["image_grid_thw"]]
    begin = sum(counts[:index])
    flat = np.asarray(inputs["pixel_values"])[begin : begin + counts[index]]
    _, rows, columns = (int(each) for each in inputs["image_grid_thw"][index])
    size, merge = self.image.patch_size, self.image.merge_size
    shape = (rows // merge, columns // merge, merge, merge, 3, self.image.temporal_patch_size, size, size)
    one = flat.reshape(shape)[:, :, :, :, :, 0]
    return channels_last(one.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size))


def qwen(processor: type, model_type: str, **image: Any) -> Oracle:
    made = Qwen2VLImageProcessorPil(**image)
    config = {"model_type": model_type, "image_token_id": token("<|image_pad|>")}
    return Oracle(config, made, processor, {"image_token": "<|image_pad|>"}, "<|image_pad|>", tiles=patches)


# Gemma.


def gemma4_patches(self: Oracle, inputs: dict[str, Any], index: int) -> np.ndarray:
    places = inputs["image_position_ids"][index]
    columns, rows = (int(each) + 1 for each in places.max(axis=0))
    size = self.image.patch_size
    flat = np.asarray(inputs["pixel_values"][index])[: rows * columns]
    one = flat.reshape(rows, columns, size, size, 3).transpose(4, 0, 2, 1, 3)
    return channels_last(one.reshape(3, rows * size, columns * size))


# LLaVA.


def single(self: Oracle, inputs: dict[str, Any], index: int) -> np.ndarray:
    return channels_last(inputs["pixel_values"][index])


def unpadded(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(self.image.preprocess(list(images), do_pad=False, **RAW))


def of_one_request(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(self.image.preprocess([list(images)], do_pad=False, **RAW))


def llava(image: Any, extra: int, **vision: Any) -> Oracle:
    values = {"patch_size": 14, "num_additional_image_tokens": extra, "vision_feature_select_strategy": "default"}
    if not extra:
        values["vision_feature_select_strategy"] = "full"
    config = {"model_type": "llava", "image_token_index": token("<image>"), "vision_config": vision}
    return Oracle(config, image, LlavaProcessor, {"image_token": "<image>", **values}, "<image>", values, tiles=single)


# Pixtral.


class PixtralText:
    """`replace_image_token` of PixtralProcessor."""

    replace_image_token = staticmethod(sources("models/pixtral/processing_pixtral.py")["replace_image_token"])


def merged(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    size = self.attributes["patch_size"] * self.attributes["spatial_merge_size"]
    return dict(self.image.preprocess(list(images), do_pad=False, patch_size=size, **RAW))


def pixtral(model_type: str, merge: int, edge: int) -> Oracle:
    values = {"patch_size": 14 if merge > 1 else 16, "spatial_merge_size": merge}
    texts = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    config = {
        "model_type": model_type,
        "image_token_index": token("[IMG]"),
        "vision_config": {"model_type": "pixtral"},
    }
    image = PixtralImageProcessorPil(size={"longest_edge": edge})
    return Oracle(config, image, PixtralText, {**values, **texts}, "[IMG]", {**values, **texts}, merged, single)


# InternVL.


def dynamic(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(self.image.preprocess(list(images), crop_to_patches=True, **RAW))


def counted(self: Oracle, inputs: dict[str, Any], index: int) -> np.ndarray:
    begin = sum(inputs["num_patches"][:index])
    return channels_last(inputs["pixel_values"][begin : begin + inputs["num_patches"][index]])


# Llama 4, of which transformers has no processor without torchvision: its geometry, and torch's resizing.


class Llama4Image:
    """`_preprocess` of Llama4ImageProcessor before values are scaled, with the functions of its file."""

    size = SimpleNamespace(height=56, width=56)
    max_patches = 16

    def __init__(self) -> None:
        self._its = sources("models/llama4/image_processing_llama4.py")

    def to_json_string(self) -> str:
        return json.dumps({"size": vars(self.size), "max_patches": self.max_patches, "resample": 2})

    def preprocess(self, image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
        resolutions = torch.tensor(self._its["find_supported_resolutions"](self.max_patches, self.size))
        size = (image.height, image.width)
        canvas = self._its["get_best_fit"](size, resolutions)
        edge = self.size.height
        within = (min(max(size[0], edge), int(canvas[0])), min(max(size[1], edge), int(canvas[1])))
        height, width = self._its["get_max_res_without_distortion"](size, within)
        rows, columns = int(canvas[0]) // edge, int(canvas[1]) // edge
        drawn = np.zeros((int(canvas[0]), int(canvas[1]), 3), np.uint8)
        small = self._resized(image, max(height, 1), max(width, 1))
        drawn[: small.shape[0], : small.shape[1]] = small
        tiles = list(drawn.reshape(rows, edge, columns, edge, 3).transpose(0, 2, 1, 3, 4).reshape(-1, edge, edge, 3))
        if len(tiles) > 1:
            tiles.append(self._resized(image, edge, edge))
        return np.stack(tiles), (rows, columns)

    @staticmethod
    def _resized(image: Image.Image, height: int, width: int) -> np.ndarray:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        made = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        return made.round().clamp(0, 255).byte()[0].permute(1, 2, 0).numpy()


def llama4_process(self: Oracle, images: Sequence[Image.Image]) -> dict[str, Any]:
    made = [self.image.preprocess(image) for image in images]
    return {
        "tiles": [tiles for tiles, _ in made],
        "aspect_ratios": [ratio for _, ratio in made],
        "pixel_values": [np.zeros((3, 56, 56))],
    }


ONEVISION = [[edge * 28 * a, edge * 28 * b] for edge in (3,) for a in range(1, 5) for b in range(1, 5)]
NEXT = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]
PER_TILE = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
CLIP = {"model_type": "clip_vision_model", "patch_size": 14}

ORACLES: dict[str, Oracle] = {
    "smolvlm": idefics(
        SmolVLMImageProcessorPil(size={"longest_edge": 512}, max_image_size={"longest_edge": 128}),
        SmolVLMProcessor,
        "smolvlm",
    ),
    "smolvlm2": idefics(
        SmolVLMImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
        SmolVLMProcessor,
        "smolvlm",
    ),
    "idefics3": idefics(Idefics3ImageProcessorPil(), Idefics3Processor, "idefics3"),
    "idefics3-whole": idefics(Idefics3ImageProcessorPil(do_image_splitting=False), Idefics3Processor, "idefics3"),
    "qwen2-vl": qwen(Qwen2VLProcessor, "qwen2_vl"),
    "qwen2-vl-bounds": qwen(Qwen2VLProcessor, "qwen2_5_vl", min_pixels=28 * 28 * 16, max_pixels=28 * 28 * 100),
    "qwen3-vl": qwen(
        Qwen3VLProcessor, "qwen3_vl", patch_size=16, size={"shortest_edge": 256 * 256, "longest_edge": 1024 * 1024}
    ),
    "qwen3.5": qwen(
        Qwen3VLProcessor, "qwen3_5", patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096}
    ),
    "gemma3": Oracle(
        {
            "model_type": "gemma3",
            "image_token_index": token("<image_soft_token>"),
            "boi_token_index": token("<start_of_image>"),
            "eoi_token_index": token("<end_of_image>"),
        },
        Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
        Gemma3Processor,
        {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"},
        "<start_of_image>",
        {"image_seq_length": 256},
        tiles=single,
    ),
    "gemma4": Oracle(
        {
            "model_type": "gemma4",
            "image_token_id": token("<|image|>"),
            "boi_token_id": token("<|image>"),
            "eoi_token_id": token("<image|>"),
        },
        Gemma4ImageProcessorPil(),
        Gemma4Processor,
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        "<|image|>",
        tiles=gemma4_patches,
    ),
    "llava-clip": llava(
        LlavaImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}), 1, **CLIP
    ),
    "llava-square": llava(LlavaImageProcessorPil(do_pad=True, crop_size={"height": 210, "width": 182}), 1, **CLIP),
    "llava-odd": llava(LlavaImageProcessorPil(size={"shortest_edge": 57}, crop_size={"height": 70, "width": 84}), 1),
    "llava-siglip": llava(
        SiglipImageProcessorPil(size={"height": 384, "width": 384}), 0, model_type="siglip_vision_model"
    ),
    "llava-pixtral": pixtral("llava", 1, 1024),
    "mistral3": pixtral("mistral3", 2, 1540),
    "llava-next": Oracle(
        {"model_type": "llava_next", "image_token_index": token("<image>"), "vision_config": CLIP},
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}, image_grid_pinpoints=NEXT
        ),
        LlavaNextProcessor,
        {"image_token": "<image>", **PER_TILE},
        "<image>",
        PER_TILE,
        unpadded,
        single,
    ),
    "onevision": Oracle(
        {"model_type": "llava_onevision", "image_token_index": token("<image>"), "vision_config": {"patch_size": 14}},
        LlavaOnevisionImageProcessorPil(size={"height": 84, "width": 84}, image_grid_pinpoints=ONEVISION),
        LlavaOnevisionProcessor,
        {"image_token": "<image>", "num_image_tokens": 36, "vision_aspect_ratio": "anyres_max_4"}
        | {"vision_feature_select_strategy": "full"},
        "<image>",
        {
            "num_image_tokens": 36,
            "vision_aspect_ratio": "anyres_max_4",
            "vision_feature_select_strategy": "full",
        },
        of_one_request,
        single,
    ),
    "internvl": Oracle(
        {"model_type": "internvl", "image_token_id": token("<IMG_CONTEXT>")},
        GotOcr2ImageProcessorPil(size={"height": 112, "width": 112}),
        InternVLProcessor,
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_token": "<IMG_CONTEXT>",
            "image_seq_length": 16,
        },
        "<IMG_CONTEXT>",
        {"image_seq_length": 16},
        dynamic,
        counted,
    ),
    "llama4": Oracle(
        {"model_type": "llama4", "image_token_index": token("<|patch|>")},
        Llama4Image(),
        Llama4Processor,
        {"patch_size": 14, "downsample_ratio": 4},
        "<|image|>",
        {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        llama4_process,
        lambda self, inputs, index: inputs["tiles"][index],
    ),
}
