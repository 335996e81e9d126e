"""Features of images: those of transformers, from checkpoints as published and as it saves them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ImageProcessorPil, Qwen2VLImageProcessorPil

from funitel.model_server.media.families.load import open_media, tower_bytes
from funitel.model_server.media.families.table import FAMILIES
from funitel.model_server.media.interface import MediaFeatures
from funitel.model_server.media.service import FeatureService
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.tools.models.estimate import needs_of
from funitel.proto.errors import InvalidRequest, WeightsError
from funitel.proto.step import MediaInput, MediaKind
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_vision import IMAGE_TOKEN, TINY_VISION, TinyVision, media_of

CPU = torch.device("cpu")
TOLERANCE = 1e-5
NUM_FEATURES = {
    **dict.fromkeys(("idefics3", "smolvlm", "internvl"), 12),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 6),
    **{"gemma3": 8, "gemma4": 6, "llava": 16, "pixtral": 24, "mistral3": 6, "llama4": 8},
    **{"llava_next": 72, "llava_onevision": 46},
}


def opened(folder: Path, tiny: TinyVision, **settings: Any) -> FeatureService:
    found = open_media(
        ModelServerSettings(model_id=str(folder), **settings), folder, tiny.architecture, torch.float32, CPU
    )
    assert found is not None
    return found[0]


def _patches(tiny: TinyVision, tiles: torch.Tensor) -> dict[str, Any]:
    """As the image processors of Qwen and Gemma 4 cut an image that needs no resizing."""
    image = tiles[0].permute(2, 0, 1).numpy()
    if tiny.grid:
        vision = tiny.config().vision_config
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        processor = Qwen2VLImageProcessorPil(do_resize=False, **tiny.statistics, **sizes)
        found = processor(image, return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    found = processor(image, do_resize=False, return_tensors="pt")
    return {"pixel_values": found["pixel_values"].float(), "image_position_ids": found["image_position_ids"]}


INPUTS: dict[str, Callable[[TinyVision, torch.Tensor], dict[str, Any]]] = {
    **dict.fromkeys(("idefics3", "smolvlm"), lambda tiny, tiles: {"pixel_values": tiny.pixels(tiles)[None]}),
    **dict.fromkeys(
        ("pixtral", "mistral3"),
        lambda tiny, tiles: {"pixel_values": tiny.pixels(tiles), "image_sizes": torch.tensor([tiles.shape[1:3]])},
    ),
    **dict.fromkeys(
        ("llava_next", "llava_onevision"),
        lambda tiny, tiles: {"pixel_values": tiny.pixels(tiles)[None], "image_sizes": torch.tensor([tiny.size])},
    ),
    **dict.fromkeys((name for name, tiny in TINY_VISION.items() if tiny.grid or name == "gemma4"), _patches),
}


@torch.inference_mode()
def expected(name: str, model: Any, tiles: torch.Tensor) -> MediaFeatures:
    """What `get_image_features` of transformers gives, of what its image processors would give it."""
    tiny = TINY_VISION[name]
    inputs = INPUTS.get(name, lambda tiny, tiles: {"pixel_values": tiny.pixels(tiles)})(tiny, tiles)
    output = model.get_image_features(**inputs, return_dict=True)
    if name == "llama4":
        found = model.multi_modal_projector(output.last_hidden_state.flatten(0, 1))
        return MediaFeatures(found)
    pooled = output.pooler_output
    parts = pooled if isinstance(pooled, list | tuple) else [pooled]
    deep = [torch.cat(list(each)) for each in getattr(output, "deepstack_features", None) or ()]
    return MediaFeatures(torch.cat([each.reshape(-1, each.shape[-1]) for each in parts]), tuple(deep))


def error(found: MediaFeatures, wanted: MediaFeatures) -> float:
    pairs = zip((found.features, *found.deep), (wanted.features, *wanted.deep), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("name", TINY_VISION)
def test_features_are_those_of_transformers(name: str, as_published: bool, tmp_path: Path) -> None:
    tiny = TINY_VISION[name]
    model = tiny.write(tmp_path, as_published=as_published)
    encoder = opened(tmp_path, tiny).encoder
    for seed in range(2):
        found = encoder.encode(media_of(tiny, NUM_FEATURES[name], seed), lambda: None)
        wanted = expected(name, model, tiny.image(seed))
        assert len(found.features) == NUM_FEATURES[name]
        assert float(wanted.features.std()) > 0.01
        assert error(found, wanted) < TOLERANCE
    assert found.num_bytes == len(found.features) * encoder.feature_bytes
    assert encoder.placeholder_ids == {MediaKind.IMAGE: IMAGE_TOKEN}
    assert encoder.has_axes == name.startswith("qwen")
    assert encoder.has_whole_spans == name.startswith("gemma")


@pytest.mark.parametrize("name", TINY_VISION)
def test_images_in_one_forward_have_the_features_that_they_have_alone(name: str, tmp_path: Path) -> None:
    tiny = TINY_VISION[name]
    tiny.write(tmp_path)
    encoder = opened(tmp_path, tiny).encoder
    assert encoder.has_batches(MediaKind.IMAGE) == (name != "llava_onevision")
    items = [media_of(tiny, NUM_FEATURES[name], seed) for seed in range(3)]
    alone = [encoder.encode(each, lambda: None) for each in items]
    assert error(alone[0], alone[1]) > 0.01
    if encoder.has_batches(MediaKind.IMAGE):
        for found, wanted in zip(encoder.encode_alike(items, lambda: None), alone, strict=True):
            assert error(found, wanted) < TOLERANCE


def test_every_family_is_held_against_transformers() -> None:
    assert {tiny.architecture for tiny in TINY_VISION.values()} == FAMILIES.keys()
    assert NUM_FEATURES.keys() == TINY_VISION.keys()


@pytest.mark.parametrize(("name", "prefix"), [("llava", ""), ("llava_next", "model."), ("gemma3", "")])
def test_layers_of_a_tower_may_lie_one_level_further_down(name: str, prefix: str, tmp_path: Path) -> None:
    """As in checkpoints made before CLIP and SigLIP lost the level `vision_model`."""
    tiny = TINY_VISION[name]
    model = tiny.write(tmp_path)
    path = tmp_path / "model.safetensors"
    own = ("vision_tower.", "multi_modal_projector.", "image_newline")
    renamed = {
        (prefix + key.replace("vision_tower.", "vision_tower.vision_model.") if key.startswith(own) else key): tensor
        for key, tensor in load_file(path).items()
    }
    assert any("vision_tower.vision_model.embeddings" in key for key in renamed)
    save_file(renamed, path)
    found = opened(tmp_path, tiny).encoder.encode(media_of(tiny, NUM_FEATURES[name]), lambda: None)
    assert error(found, expected(name, model, tiny.image())) < TOLERANCE


def test_one_tile_of_llava_onevision_is_an_image_that_was_not_cut(tmp_path: Path) -> None:
    tiny = TINY_VISION["llava_onevision"]
    model = tiny.write(tmp_path)
    whole = replace(tiny, shape=(1, 16, 16))
    found = opened(tmp_path, tiny).encoder.encode(media_of(whole, 17), lambda: None)
    with torch.inference_mode():
        output = model.get_image_features(
            pixel_values=whole.pixels(whole.image())[None],
            image_sizes=torch.tensor([whole.size]),
            batch_num_images=torch.tensor([2]),
            return_dict=True,
        )
    assert error(found, MediaFeatures(output.pooler_output[0])) < TOLERANCE


def test_a_processor_may_leave_out_what_is_usual(tmp_path: Path) -> None:
    tiny = TINY_VISION["llava"]
    model = tiny.write(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"size": {"height": 16}}}))
    found = opened(tmp_path, tiny).encoder.encode(media_of(tiny, 16), lambda: None)
    usual = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    with torch.inference_mode():
        pixels = replace(tiny, statistics=usual).pixels(tiny.image())
        wanted = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output[0]
    assert error(found, MediaFeatures(wanted)) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "removed", "reason"),
    [
        ({}, "preprocessor_config.json", "has no preprocessor_config.json"),
        ({"media_cache_gb": 0.0}, "", "--media-cache-gb is 0"),
        ({"layer_parts": "0-2=int8", "num_shard": None}, "", "images are not for --layer-parts 0-2=int8"),
    ],
)
def test_a_model_may_take_text_alone(
    settings: dict[str, Any], removed: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TINY_VISION["llava"]
    tiny.write(tmp_path)
    if removed:
        (tmp_path / removed).unlink()
    settings.pop("num_shard", None)
    caplog.set_level("INFO")
    chosen = ModelServerSettings(model_id=str(tmp_path), **settings)
    assert open_media(chosen, tmp_path, tiny.architecture, torch.float32, CPU) is None
    assert "text alone is served" in caplog.text
    assert reason in caplog.text


def test_a_setting_for_a_model_of_text_is_said_to_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_executor(save_tiny("llama", tmp_path), media_cache_gb=1.0)
    assert "--media-cache-gb 1 changes nothing: the model takes text alone" in caplog.messages


@pytest.mark.parametrize("name", TINY_VISION)
def test_what_a_tower_takes_is_known_before(name: str, tmp_path: Path) -> None:
    tiny = TINY_VISION[name]
    tiny.write(tmp_path)
    assert tower_bytes(tmp_path, "LlamaForCausalLM", torch.float32, CPU) == 0
    predicted = tower_bytes(tmp_path, tiny.architecture, torch.float32, CPU)
    found = open_media(ModelServerSettings(model_id=str(tmp_path)), tmp_path, tiny.architecture, torch.float32, CPU)
    assert found is not None
    assert found[1].held_bytes == predicted > 0


def test_an_estimate_counts_the_tower(tmp_path: Path) -> None:
    TINY_VISION["qwen2_vl"].write(tmp_path)
    settings = ModelsSettings(model_id=str(tmp_path), device="cpu", dtype="float32")
    with_tower = needs_of(settings, tmp_path).weights
    (tmp_path / "preprocessor_config.json").unlink()
    alone = needs_of(settings, tmp_path).weights
    assert [a - b for a, b in zip(with_tower, alone, strict=True)] == [196736]


def test_a_tower_without_a_tensor_is_refused(tmp_path: Path) -> None:
    tiny = TINY_VISION["llava"]
    tiny.write(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key: each for key, each in load_file(path).items() if "pre_layrnorm.bias" not in key}, path)
    with pytest.raises(WeightsError, match=r"^the checkpoint lacks tensor vision_tower.pre_layrnorm.bias"):
        opened(tmp_path, tiny)


def test_statistics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tiny = TINY_VISION["llava"]
    tiny.write(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    for bad in ({"image_mean": [0.5, "x", 0.5]}, {"image_std": [0.5, 0.0, 0.5]}, {"rescale_factor": -1}):
        path.write_text(json.dumps({"image_std": [1, 1, 1]} | bad))
        with pytest.raises(WeightsError, match=rf"^{path}: .*{next(iter(bad))}"):
            opened(tmp_path, tiny)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no image": ("llava", {"shape": (16, 16, 3)}, "shape must be tiles, height, width and 3, given"),
    "no channels": ("llava", {"shape": (1, 16, 16, 4)}, "shape must be tiles, height, width and 3, given"),
    "few bytes": ("llava", {"values": b"abc"}, "values must be the 768 bytes of shape, given 3"),
    "other size": ("llava", {"shape": (1, 16, 20, 3)}, "shape must have tiles of 16 x 16, given 16 x 20"),
    "no squares": ("smolvlm", {"shape": (3, 16, 8, 3)}, "shape must have square tiles of 16 at most, given 16 x 8"),
    "no patches": ("smolvlm", {"shape": (3, 12, 12, 3)}, "shape must have sides that are multiples of 8, given 12"),
    "two images": ("qwen2_vl", {"shape": (2, 24, 16, 3)}, "shape must have 1 tile for this model, given 2"),
    "odd sides": ("qwen2_vl", {"shape": (1, 20, 16, 3)}, "shape must have sides that are multiples of 8, given 20"),
    "other grid": ("qwen2_vl", {"grid": (1, 2, 3)}, r"grid must be \[1, 3, 2\] for an image of 24 x 16, given"),
    "long side": ("gemma4", {"shape": (1, 136, 16, 3)}, "shape must have at most 16 patches a side"),
    "no size": ("llava_next", {"size": ()}, r"size must be a height and a width, given \[\]"),
    "few tiles": ("llava_next", {"shape": (2, 16, 16, 3)}, "shape must have 5 tiles for an image of 30 x 20, given 2"),
    "features": ("llava", {"num_features": 15}, "num_features must be 16 for this item, given 15"),
    "a sound": ("llava", {"kind": MediaKind.AUDIO}, "kind audio is not taken by this model"),
}


@pytest.mark.parametrize("case", BAD)
def test_items_that_do_not_fit_the_model_are_refused(case: str, tmp_path: Path) -> None:
    name, changes, message = BAD[case]
    tiny = TINY_VISION[name]
    tiny.write(tmp_path)
    good = media_of(tiny, NUM_FEATURES[name])
    shape = changes.get("shape", good.shape)
    values = np.zeros(int(np.prod(shape)), np.uint8).tobytes()
    bad: MediaInput = replace(good, **{"values": values, **changes})
    service = opened(tmp_path, tiny)
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        service.encode(bad).result()
    assert len(service.cache) == 0
    service.encode(good).result()
    assert len(service.cache) == 1


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])
def test_ranks_have_the_same_features(name: str, tmp_path: Path) -> None:
    tiny = TINY_VISION[name]
    tiny.write(tmp_path)
    media = media_of(tiny, NUM_FEATURES[name])
    first, second = (opened(tmp_path, tiny) for _ in range(2))
    for service in (first, second):
        service.encode(media).result()
    assert error(first.features(media.key), second.features(media.key)) == 0.0
