"""The text of models for images too: the logits of transformers, from checkpoints as published and as it saves them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.registry.wrapped import WRAPPED
from funitel.model_server.tools.spec import check
from funitel.proto.errors import NoRow
from funitel_testing import forward_worker
from funitel_testing.families import TOLERANCE
from funitel_testing.media_zoo import IMAGES
from funitel_testing.threads import on_ranks
from funitel_testing.voice_models import VOICE_FAMILIES
from funitel_testing.zoo import HIDDEN, ZOO

_SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXTRAL = {"image_size": 28, "patch_size": 14, "head_dim": 8, **_SIGHT, "model_type": "pixtral"}
_QWEN_SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
# Kind of the wrapper, the checkpoint of the zoo that is its text, what else the text needs, and its other part.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("Mistral3", "mistral", {"model_type": "mistral"}, _PIXTRAL),
    "ministral3": ("Mistral3", "ministral3", {"model_type": "ministral3"}, _PIXTRAL),
    "gemma3": ("Gemma3", "gemma3", {}, {**_SIGHT, "image_size": 28, "patch_size": 14}),
    "llama4": (
        "Llama4",
        "llama4",
        {},
        {**_SIGHT, "image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16}
        | {"vision_output_dim": 16, "intermediate_size": 64},
    ),
    "mistral4": ("Mistral3", "mistral4", {"model_type": "mistral4"}, _PIXTRAL),
    "qwen2_vl": (
        "Qwen2VL",
        "qwen2",
        {"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        {"depth": 1, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 14},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        {**_QWEN_SIGHT, "patch_size": 14, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}},
        {**_QWEN_SIGHT, "deepstack_visual_indexes": [0], "patch_size": 14},
    ),
    "gemma4": (
        "Gemma4",
        "gemma4_shared",
        {"pad_token_id": 0},
        {**_SIGHT, "head_dim": 8, "patch_size": 4, "num_key_value_heads": 2},
    ),
    "gemma4_unified": ("Gemma4Unified", "gemma4_unified", {"pad_token_id": 0}, {}),
    "qwen3_vl": (
        "Qwen3VL",
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}},
        {**_QWEN_SIGHT, "deepstack_visual_indexes": [0], "patch_size": 14},
    ),
    "qwen3_5": (
        "Qwen3_5",
        "qwen3_5",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}},
        {**_QWEN_SIGHT, "patch_size": 14},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        "qwen3_5_moe",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}},
        {**_QWEN_SIGHT, "patch_size": 14},
    ),
}


def build(name: str, *, is_tied: bool) -> Any:
    """The whole model in transformers, its text with weights as large as those of the zoo."""
    kind, text, more, sight = CASES[name]
    given = dict(ZOO[text].config) | {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None} | more
    config = getattr(transformers, f"{kind}Config")(
        text_config=given | {"tie_word_embeddings": is_tied}, vision_config=sight, tie_word_embeddings=is_tied
    )
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "norm" in label:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_text_gives_the_logits_of_transformers(
    name: str, as_published: bool, is_tied: bool, tmp_path: Path
) -> None:
    model = build(name, is_tied=is_tied)
    model.save_pretrained(tmp_path, save_original_format=as_published)
    assert any("vision" in each or "visual" in each for each in load_file(tmp_path / "model.safetensors"))
    prompts = [list(range(40)), [7, 8, 9, 10, 11]]
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([ids])).logits[0] for ids in prompts]
    found = on_ranks(2, lambda parallel: forward_worker.run(tmp_path, parallel, prompts, 3))
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < TOLERANCE
    assert check(tmp_path, None) == []
    spec = spec_of(json.loads((tmp_path / "config.json").read_text()))
    assert (spec.architecture in WRAPPED, spec.hidden_size) == (True, HIDDEN)


def test_a_config_may_have_the_text_at_its_top(tmp_path: Path) -> None:
    build("qwen2_5_vl", is_tied=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    flat = text | config | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e4}
    flat.pop("rope_parameters")
    assert spec_of(flat) == spec_of(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("text", [None, {"model_type": "nobodys"}])
def test_a_text_without_a_row_is_left_to_transformers(text: Any) -> None:
    with pytest.raises(NoRow, match="Gemma3ForConditionalGeneration with a text_config of model_type"):
        spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})


def test_every_wrapper_is_held_against_transformers() -> None:
    kinds = {kind for kind, *_ in CASES.values()} | {tiny.kind for tiny in IMAGES.values()}
    held = {f"{kind}ForConditionalGeneration" for kind in kinds}
    held |= {row.architecture for row in VOICE_FAMILIES.values()}
    assert WRAPPED.keys() == held | {"Gemma3nForConditionalGeneration"}


def test_the_text_of_gemma_3n_is_served_though_its_eyes_need_a_library(tmp_path: Path) -> None:
    model = ZOO["gemma3n"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.timm_model.stem", "audio_tower.conv", "embed_vision.embedding", "embed_audio.hard_norm")
    inner |= {f"model.{other}.weight": torch.ones(3) for other in others}
    # Published checkpoints have keys and values of layers that use those of others.
    inner |= {f"model.language_model.layers.4.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "k_norm")}
    save_file(inner, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = model(input_ids=torch.arange(40)[None]).logits[0]
    found = forward_worker.run(tmp_path, TensorParallel(), [list(range(40))], 3)[0]
    assert float((found - expected).abs().max()) < TOLERANCE
