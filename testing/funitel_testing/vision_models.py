"""Small random models that see images, in Hugging Face layout: weights, processor, tokenizer and chat template.

All families share one tokenizer: a token for each byte, then the special tokens of every family. `oracle` answers by
transformers' own processor and model.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from funitel_testing.tiny import EOS, VOCAB_SIZE, byte_tokenizer

_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIALS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<pad>", "<bos>"),
    *("<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    *("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
FIRST_SPECIAL = VOCAB_SIZE
VOCAB = VOCAB_SIZE + len(SPECIALS) + 2
IDS = {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIALS)}
HIDDEN = 32

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
_SIGHT = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP = {**_SIGHT, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 24}
_SIGLIP = {**_SIGHT, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
_PIXTRAL = {**_SIGHT, "model_type": "pixtral", "image_size": 112, "patch_size": 7, "head_dim": 12}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_QWEN = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
_QWEN_SIGHT = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 8}
_QWEN_SIZE = {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 40}
_QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_LLAVA = {"image_token_index": IDS["<image>"], "image_token_id": IDS["<image>"]}
_PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


@dataclass(frozen=True)
class VisionFamily:
    """How the small model of a family is made.

    `text`, `vision` and `config` differ from the common ones; `marker` is what its chat template writes for an image.
    """

    kind: str  # of the classes
    text: dict[str, Any]
    vision: dict[str, Any]
    config: dict[str, Any]
    processor: str  # class of the processor
    images: tuple[str, dict[str, Any]]  # class of the image processor, and its settings
    marker: str
    processor_settings: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)  # that the tokenizer knows by a name


_IDEFICS = {
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 28},
    "do_image_splitting": True,
}
VISION_FAMILIES: dict[str, VisionFamily] = {
    "idefics3": VisionFamily(
        "Idefics3",
        {"model_type": "llama"},
        {**_SIGHT, "image_size": 28, "patch_size": 7},
        {"image_token_id": IDS["<image>"], "scale_factor": 2, "pad_token_id": 256},
        "Idefics3Processor",
        ("Idefics3ImageProcessorPil", _IDEFICS),
        "<image>",
        {"image_seq_len": 4},
    ),
    "smolvlm": VisionFamily(
        "SmolVLM",
        {"model_type": "llama"},
        {**_SIGHT, "image_size": 28, "patch_size": 7},
        {"image_token_id": IDS["<image>"], "scale_factor": 2, "pad_token_id": 256},
        "SmolVLMProcessor",
        ("SmolVLMImageProcessorPil", _IDEFICS),
        "<image>",
        {"image_seq_len": 4},
    ),
    "qwen2_vl": VisionFamily(
        "Qwen2VL",
        {"rope_parameters": {**_MROPE, "rope_type": "mrope", "mrope_section": [2, 1, 1]}, "head_dim": 8},
        {"depth": 2, "embed_dim": 24, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 8},
        _QWEN,
        "Qwen2VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 8, "size": _QWEN_SIZE}),
        _QWEN_TEXT,
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen2_5_VL",
        {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}, "head_dim": 8},
        {**_QWEN_SIGHT, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1], "window_size": 32},
        _QWEN,
        "Qwen2_5_VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 8, "size": _QWEN_SIZE}),
        _QWEN_TEXT,
    ),
    "qwen3_vl": VisionFamily(
        "Qwen3VL",
        {"rope_parameters": _MROPE},
        {**_QWEN_SIGHT, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64},
        _QWEN,
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 8, "size": _QWEN_SIZE}),
        _QWEN_TEXT,
    ),
    "qwen3_vl_moe": VisionFamily(
        "Qwen3VLMoe",
        {"rope_parameters": _MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {**_QWEN_SIGHT, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64},
        _QWEN,
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 8, "size": _QWEN_SIZE}),
        _QWEN_TEXT,
    ),
    "qwen3_5": VisionFamily(
        "Qwen3_5",
        {
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {**_QWEN_SIGHT, "out_hidden_size": HIDDEN, "num_position_embeddings": 64},
        _QWEN,
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 8, "size": _QWEN_SIZE}),
        _QWEN_TEXT,
    ),
    "gemma3": VisionFamily(
        "Gemma3",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"query_pre_attn_scalar": 16, "pad_token_id": 0},
        {**_SIGHT, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 7},
        {
            "mm_tokens_per_image": 16,
            "boi_token_index": IDS["<start_of_image>"],
            "eoi_token_index": IDS["<end_of_image>"],
            "image_token_index": IDS["<image_soft_token>"],
            "image_token_id": IDS["<image_soft_token>"],
        },
        "Gemma3Processor",
        ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
        "<start_of_image>",
        {"image_seq_length": 16},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "gemma4": VisionFamily(
        "Gemma4",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "pad_token_id": 0,
            "use_bidirectional_attention": "vision",
        },
        {**_SIGHT, "head_dim": 12, "num_key_value_heads": 2, "patch_size": 8, "pooling_kernel_size": 2}
        | {"position_embedding_size": 64},
        {
            "boi_token_id": IDS["<|image>"],
            "eoi_token_id": IDS["<image|>"],
            "image_token_id": IDS["<|image|>"],
            "video_token_id": IDS["<|video|>"],
            "audio_token_id": IDS["<|audio|>"],
            "boa_token_id": IDS["<|audio>"],
            "eoa_token_index": IDS["<audio|>"],
            "audio_config": None,
        },
        "Gemma4Processor",
        ("Gemma4ImageProcessorPil", {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
        "<|image|>",
        {},
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "llava": VisionFamily(
        "Llava",
        {"model_type": "llama"},
        _CLIP,
        {**_LLAVA, "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_seq_length": 16},
        "LlavaProcessor",
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
        "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_pixtral": VisionFamily(
        "Llava",
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
        {
            "image_token_index": IDS["[IMG]"],
            "image_token_id": IDS["[IMG]"],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 112}, "patch_size": {"height": 7, "width": 7}}),
        "[IMG]",
        {"patch_size": 7},
    ),
    "llava_next": VisionFamily(
        "LlavaNext",
        {"model_type": "llama"},
        _CLIP,
        {**_LLAVA, "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_seq_length": 16}
        | {"image_grid_pinpoints": _PINPOINTS},
        "LlavaNextProcessor",
        (
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
            | {"image_grid_pinpoints": _PINPOINTS},
        ),
        "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": VisionFamily(
        "LlavaOnevision",
        {"model_type": "qwen2"},
        _SIGLIP,
        {**_LLAVA, "image_grid_pinpoints": _PINPOINTS, "vision_aspect_ratio": "anyres_max_9"},
        "LlavaOnevisionProcessor",
        (
            "LlavaOnevisionImageProcessorPil",
            {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": _PINPOINTS},
        ),
        "<image>",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    ),
    "mistral3": VisionFamily(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
        {"image_token_index": IDS["[IMG]"], "image_token_id": IDS["[IMG]"], "spatial_merge_size": 2},
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}),
        "[IMG]",
        {"patch_size": 7, "spatial_merge_size": 2},
    ),
    "internvl": VisionFamily(
        "InternVL",
        {"model_type": "qwen2"},
        {**_SIGHT, "image_size": [28, 28], "patch_size": [7, 7]},
        {"image_token_id": IDS["<IMG_CONTEXT>"], "image_seq_length": 4, "downsample_ratio": 0.5},
        "InternVLProcessor",
        (
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 6, "min_patches": 1},
        ),
        "<IMG_CONTEXT>",
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "llama4": VisionFamily(
        "Llama4",
        {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 2048, "use_qk_norm": False},
        {**_SIGHT, "intermediate_size": 96, "image_size": 28, "patch_size": 7, "projector_input_dim": 24}
        | {"projector_output_dim": 24, "vision_output_dim": 24},
        {
            "boi_token_index": IDS["<|image_start|>"],
            "eoi_token_index": IDS["<|image_end|>"],
            "image_token_index": IDS["<|patch|>"],
            "image_token_id": IDS["<|patch|>"],
        },
        "Llama4Processor",
        (
            "Llama4ImageProcessor",
            {"size": {"height": 28, "width": 28}, "max_patches": 6, "resize_to_max_canvas": False},
        ),
        "<|image|>",
        {"patch_size": 7},
    ),
}


def vision_tokenizer() -> Tokenizer:
    """The byte tokenizer with the special tokens of every family behind it: VOCAB - 2 tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def template_of(marker: str) -> str:
    """A chat template of the usual kind: a content is a text, or a list of parts of which images are marked."""
    return (
        "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'image' %}"
        + marker
        + "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
        + "[assistant]"
    )


def save_vision(
    family: str,
    folder: Path,
    seed: int = 0,
    *,
    vision: Mapping[str, Any] = MappingProxyType({}),
    config: Mapping[str, Any] = MappingProxyType({}),
    images: Mapping[str, Any] = MappingProxyType({}),
    processor: Mapping[str, Any] = MappingProxyType({}),
    **text: Any,
) -> Path:
    """Save a random model of `family` with all that a server needs; returns `folder`.

    What else is given changes the settings of its tower, its config, its image processor, its processor and its text
    model.
    """
    known = VISION_FAMILIES[family]
    row = replace(
        known,
        vision=known.vision | vision,
        config=known.config | config,
        images=(known.images[0], known.images[1] | images),
        processor_settings=known.processor_settings | processor,
    )
    config_class = getattr(transformers, f"{row.kind}Config")
    settings = _TEXT | row.text | text
    whole = config_class(text_config=settings, vision_config=row.vision, tie_word_embeddings=False, **row.config)
    whole.eos_token_id = 256
    torch.manual_seed(seed)
    model = getattr(transformers, f"{row.kind}ForConditionalGeneration")(whole).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name or "layer_norm" in name:
                parameter.add_(noise * 0.1)
            elif "vision" in name or "visual" in name or "projector" in name or "embed_vision" in name:
                parameter.copy_(noise * 0.2)
            else:
                parameter.copy_(noise * (0.3 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    vision_tokenizer().save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": EOS, "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    extra = {"extra_special_tokens": row.tokens} if row.tokens else {}
    template = template_of(row.marker)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokens, **row.tokens, **extra, "chat_template": template})
    )
    (folder / "chat_template.jinja").write_text(template)
    name, of_images = row.images
    image_settings = dict(of_images) if family == "llama4" else _image_processor(row).to_dict()
    image_settings["image_processor_type"] = name.removesuffix("Pil")
    image_settings["processor_class"] = row.processor
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings, default=str, indent=2))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": row.processor, **row.processor_settings}, indent=2)
    )
    return folder


class VisionOracle:
    """The answers of transformers for a folder of `save_vision`."""

    def __init__(self, family: str, folder: Path) -> None:
        row = VISION_FAMILIES[family]
        self.row = row
        self.model = getattr(transformers, f"{row.kind}ForConditionalGeneration").from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()
        tokens = {"eos_token": EOS, "pad_token": "<pad>", **row.tokens}
        extra = {"extra_special_tokens": row.tokens} if row.tokens else {}
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), **tokens, **extra
        )
        self.image_processor = _image_processor(row)
        self.processor = _processor(row, self.image_processor, self.tokenizer, template_of(row.marker))

    def inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        """What the processor makes of a text with a marker for each image."""
        made = self.processor(
            text=[text], images=[list(images)] if images else None, return_tensors="pt", add_special_tokens=False
        )
        return {key: value for key, value in made.items() if isinstance(value, torch.Tensor | list)}

    @torch.inference_mode()
    def generate(self, text: str, images: Sequence[Image.Image], max_new_tokens: int) -> list[int]:
        """Greedy completion, without what comes behind the end token."""
        inputs = self.inputs(text, images)
        found = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=256)
        return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]

    @torch.inference_mode()
    def logits(self, text: str, images: Sequence[Image.Image]) -> tuple[list[int], torch.Tensor]:
        """Token ids of the prompt, and the logits [tokens, vocabulary] behind each."""
        inputs = self.inputs(text, images)
        return inputs["input_ids"][0].tolist(), self.model(**inputs).logits[0].float()


def _image_processor(row: VisionFamily) -> Any:
    """The image processor of a family, that of Pillow; Llama 4 has none."""
    name, settings = row.images
    return getattr(transformers, name)(**settings)


def _processor(row: VisionFamily, image_processor: Any, tokenizer: Any, template: str) -> Any:
    """The processor of a family, without what it has for videos and sounds, which needs packages of its own."""
    kind = _processor_class(row.processor)
    names = [name for name in kind.get_attributes() if name not in ("image_processor", "tokenizer")]

    class OfImages(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

    settings = dict.fromkeys(names) | row.processor_settings
    return OfImages(image_processor=image_processor, tokenizer=tokenizer, chat_template=template, **settings)


def _processor_class(name: str) -> Any:
    """A class of `transformers`, also where that hides it without torchvision or num2words, which it needs not here."""
    if name == "PixtralProcessor":
        fake = ModuleType("torchvision.transforms.v2")
        fake.functional = None  # type: ignore[attr-defined]
        names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
        with patch.dict(sys.modules, dict.fromkeys(names, fake)):
            return import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    if name == "SmolVLMProcessor":
        module = import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = str  # type: ignore[attr-defined]
        return module.SmolVLMProcessor
    return getattr(transformers, name)


@lru_cache
def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture with large and small structure."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    noise = random.integers(-20, 21, (height, width, 3))
    return Image.fromarray((np.asarray(coarse, dtype=np.int64) + noise).clip(0, 255).astype(np.uint8))
