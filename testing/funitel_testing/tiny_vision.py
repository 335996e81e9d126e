"""Tiny models for images with random weights, one of each vision family, and images that fit them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from funitel.proto.step import MediaInput, MediaKind
from funitel_testing.tiny import VOCAB_SIZE, save_tokenizer

IMAGE_TOKEN = 270
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 256,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
_QWEN_VISION = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True, slots=True)
class TinyVision:
    """One family: its architecture, its config, tiles (number, height, width) of an image, and what else describes it.

    `grid` is the merged one, `size` the image's before it was cut.
    """

    architecture: str
    config: Callable[[], Any]
    shape: tuple[int, int, int]
    grid: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    statistics: Mapping[str, Any] = field(
        default_factory=lambda: {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    )

    def model(self, seed: int = 0) -> Any:
        """The model of transformers, in float32."""
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(self.config()).eval()
        with torch.no_grad():
            for each in model.parameters():  # norms and biases too
                each.add_(torch.randn_like(each) * 0.05)
        return model

    def write(self, folder: Path, seed: int = 0, *, as_published: bool = True) -> Any:
        """Write the model to a folder, with a tokenizer and preprocessor_config.json; returns it.

        `as_published`: tensors have the names of older checkpoints where these differ.
        """
        model = self.model(seed)
        model.save_pretrained(folder, save_original_format=as_published)
        save_tokenizer(folder)
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, **self.statistics})
        )
        return model

    def image(self, seed: int = 0) -> torch.Tensor:
        """Tiles of a random image: [number, height, width, 3] uint8."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (*self.shape, 3), generator=generator, dtype=torch.uint8)

    def pixels(self, tiles: torch.Tensor) -> torch.Tensor:
        """The same as a processor of transformers normalises them: [number, 3, height, width]."""
        mean, std = (
            torch.tensor(self.statistics[name]).view(1, 3, 1, 1) if name in self.statistics else plain
            for name, plain in (("image_mean", torch.zeros(1)), ("image_std", torch.ones(1)))
        )
        return (tiles.permute(0, 3, 1, 2).float() / 255 - mean) / std


def _wrapped(
    name: str,
    text_kind: str,
    vision_kind: str,
    vision: Mapping[str, Any],
    *,
    text: Mapping[str, Any] | None = None,
    **others: Any,
) -> Callable[[], Any]:
    """The config of a model, of the configs of its text and of its tower."""

    def make() -> Any:
        of_text = transformers.CONFIG_MAPPING[text_kind](**{**_TEXT, **(text or {})})
        of_vision = transformers.CONFIG_MAPPING[vision_kind](**vision)
        return getattr(transformers, name)(text_config=of_text, vision_config=of_vision, **others)

    return make


def _idefics(name: str, kind: str) -> TinyVision:
    vision = {**_VISION, "image_size": 16, "patch_size": 4}
    config = _wrapped(f"{name}Config", "llama", f"{kind}_vision", vision, scale_factor=2, image_token_id=IMAGE_TOKEN)
    return TinyVision(f"{name}ForConditionalGeneration", config, (3, 16, 16))


_CLIP = {**_VISION, "image_size": 16, "patch_size": 4}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_PIXTRAL = {**_VISION, "image_size": 32, "patch_size": 4, "head_dim": 8}


def _qwen(name: str, kind: str, vision: Mapping[str, Any], **text: Any) -> TinyVision:
    config = _wrapped(
        f"{name}Config",
        f"{kind}_text",
        f"{kind}_vision",
        {**_QWEN_VISION, **vision},
        text={"rope_parameters": _MROPE, **text},
        image_token_id=IMAGE_TOKEN,
        video_token_id=271,
        vision_start_token_id=272,
        vision_end_token_id=273,
    )
    return TinyVision(f"{name}ForConditionalGeneration", config, (1, 24, 16), grid=(1, 3, 2))


_QWEN3_VISION = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
}

TINY_VISION: Mapping[str, TinyVision] = {
    "idefics3": _idefics("Idefics3", "idefics3"),
    "smolvlm": _idefics("SmolVLM", "smolvlm"),
    "qwen2_vl": _qwen("Qwen2VL", "qwen2_vl", {"embed_dim": 32, "hidden_size": 32}),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL",
        "qwen2_5_vl",
        {
            **{"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl": _qwen("Qwen3VL", "qwen3_vl", {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": _qwen("Qwen3VLMoe", "qwen3_vl_moe", {**_QWEN3_VISION, "deepstack_visual_indexes": [1]}, **_MOE),
    "qwen3_5": _qwen("Qwen3_5", "qwen3_5", _QWEN3_VISION, **_STATES),
    "qwen3_5_moe": _qwen(
        "Qwen3_5Moe", "qwen3_5_moe", _QWEN3_VISION, **_STATES, **_MOE, shared_expert_intermediate_size=16
    ),
    "gemma3": TinyVision(
        "Gemma3ForConditionalGeneration",
        _wrapped(
            *("Gemma3Config", "gemma3_text", "siglip_vision_model", {**_CLIP, "vision_use_head": False}),
            text={"sliding_window": 16, "query_pre_attn_scalar": 8, "layer_types": _SLIDING},
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=271,
            eoi_token_index=272,
        ),
        (2, 16, 16),
    ),
    "gemma4": TinyVision(
        "Gemma4ForConditionalGeneration",
        _wrapped(
            "Gemma4Config",
            "gemma4_text",
            "gemma4_vision",
            {
                **{**_VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2},
                **{"position_embedding_size": 16, "use_clipped_linears": True, "standardize": True},
            },
            text={
                **{"sliding_window": 16, "layer_types": _SLIDING, "hidden_size_per_layer_input": 0},
                **{"use_bidirectional_attention": "vision", "global_head_dim": 8, "num_kv_shared_layers": 0},
            },
            image_token_id=IMAGE_TOKEN,
            video_token_id=271,
            audio_token_id=272,
            boi_token_id=273,
            eoi_token_id=274,
        ),
        (1, 24, 16),
        statistics={"do_normalize": False},
    ),
    "llava": TinyVision(
        "LlavaForConditionalGeneration",
        _wrapped("LlavaConfig", "llama", "clip_vision_model", _CLIP, image_token_index=IMAGE_TOKEN),
        (1, 16, 16),
    ),
    "pixtral": TinyVision(
        "LlavaForConditionalGeneration",
        _wrapped(
            *("LlavaConfig", "mistral", "pixtral", _PIXTRAL),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        (1, 24, 16),
    ),
    "llava_next": TinyVision(
        "LlavaNextForConditionalGeneration",
        _wrapped(
            *("LlavaNextConfig", "llama", "clip_vision_model", _CLIP),
            image_token_index=IMAGE_TOKEN,
            image_grid_pinpoints=_PINPOINTS,
        ),
        (5, 16, 16),
        size=(30, 20),
    ),
    "llava_onevision": TinyVision(
        "LlavaOnevisionForConditionalGeneration",
        _wrapped(
            *("LlavaOnevisionConfig", "qwen2", "siglip_vision_model", {**_CLIP, "vision_use_head": False}),
            image_token_index=IMAGE_TOKEN,
            image_grid_pinpoints=_PINPOINTS,
            vision_aspect_ratio="anyres_max_2",
        ),
        (5, 16, 16),
        size=(30, 20),
    ),
    "mistral3": TinyVision(
        "Mistral3ForConditionalGeneration",
        _wrapped("Mistral3Config", "mistral", "pixtral", _PIXTRAL, image_token_index=IMAGE_TOKEN),
        (1, 24, 16),
    ),
    "internvl": TinyVision(
        "InternVLForConditionalGeneration",
        _wrapped(
            *("InternVLConfig", "qwen2", "internvl_vision"),
            {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=IMAGE_TOKEN,
        ),
        (3, 16, 16),
    ),
    "llama4": TinyVision(
        "Llama4ForConditionalGeneration",
        _wrapped(
            "Llama4Config",
            "llama4_text",
            "llama4_vision_model",
            {
                **{**_VISION, "intermediate_size": 128, "image_size": 16, "patch_size": 4},
                **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            },
            text={"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
            image_token_index=IMAGE_TOKEN,
        ),
        (2, 16, 16),
    ),
}
"""By the `model_type` of the family; "pixtral" is LLaVA with that tower."""


def media_of(tiny: TinyVision, num_features: int, seed: int = 0, key: bytes = b"") -> MediaInput:
    """A random image of a family, as a router asks a shard to encode it."""
    tiles = tiny.image(seed)
    return MediaInput(
        key=key or b"image %d" % seed,
        kind=MediaKind.IMAGE,
        shape=tuple(tiles.shape),
        values=tiles.numpy().tobytes(),
        num_features=num_features,
        grid=tiny.grid,
        size=tiny.size,
    )
