"""Features of sounds and the logits behind them: those of transformers' whole models, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import RowMedia, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.media.families.load import open_media
from funitel.model_server.media.families.sounds import SOUND_FAMILIES
from funitel.model_server.media.service import FeatureService
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.tools.models.estimate import needs_of
from funitel.model_server.tools.spec import check
from funitel.proto.errors import InvalidRequest, WeightsError
from funitel.proto.step import MediaInput, MediaKind
from funitel_testing.media_zoo import step_at_random
from funitel_testing.tiny_whisper import sound
from funitel_testing.voice_models import NUM_MEL_BINS, VOICE_FAMILIES, WINDOW_FRAMES, Part, VoiceOracle, save_voice

CPU = torch.device("cpu")
TOLERANCE = 1e-4
BLOCK_SIZE, NUM_BLOCKS = 16, 64
PARTS: dict[str, list[Part]] = {
    "qwen2_audio": ["Hear ", sound(1.3), " and ", sound(2.71, 1), sound(0.05, 2), " behind"],
    "voxtral": ["Hear ", sound(1.3), " and ", sound(31.0, 1), " behind"],
    "gemma4": ["Hear ", sound(1.3), " and ", sound(2.71, 1), sound(0.05, 2), " behind"],
}


def opened(folder: Path, family: str, **settings: Any) -> FeatureService | None:
    found = open_media(
        ModelServerSettings(model_id=str(folder), **settings),
        folder,
        VOICE_FAMILIES[family].architecture,
        torch.float32,
        CPU,
    )
    return None if found is None else found[0]


def media_of(mel: torch.Tensor, num_features: int, size: tuple[int, ...]) -> MediaInput:
    """An item as a router sends it, of a spectrogram [mel bins, frames]."""
    return MediaInput(
        key=b"sound",
        kind=MediaKind.AUDIO,
        shape=tuple(mel.shape),
        values=mel.numpy().astype("<f4").tobytes(),
        num_features=num_features,
        size=size,
    )


def items_of(inputs: dict[str, torch.Tensor], marker: int) -> list[tuple[MediaInput, np.ndarray]]:
    """The sounds of what a processor made, with the places of their tokens."""
    places = np.flatnonzero(inputs["input_ids"][0].numpy() == marker)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    mels = inputs["input_features"]
    if "input_features_mask" in inputs:
        heard = inputs["input_features_mask"].sum(-1).tolist()
        whole = [mel[:frames].T for mel, frames in zip(mels, heard, strict=True)]
        return [(media_of(mel, len(run), ()), run) for mel, run in zip(whole, runs, strict=True)]
    if "feature_attention_mask" not in inputs:  # windows, of which each has as many features
        each = len(places) // len(mels)
        cuts = mels.split([len(run) // each for run in runs])
        whole = [cut.transpose(0, 1).reshape(NUM_MEL_BINS, -1) for cut in cuts]
        return [(media_of(mel, len(run), ()), run) for mel, run in zip(whole, runs, strict=True)]
    heard = inputs["feature_attention_mask"].sum(-1).tolist()
    counts = [((frames - 1) // 2 + 1) // 2 for frames in heard]
    runs = np.split(places, np.cumsum(counts)[:-1])
    return [
        (media_of(mel, count, (frames,)), run)
        for mel, count, frames, run in zip(mels, counts, heard, runs, strict=True)
    ]


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("family", VOICE_FAMILIES)
@torch.inference_mode()
def test_features_and_logits_are_those_of_transformers(family: str, as_published: bool, tmp_path: Path) -> None:
    save_voice(family, tmp_path, as_published=as_published)
    oracle = VoiceOracle(family, tmp_path)
    inputs = oracle.inputs(PARTS[family])
    ids = inputs["input_ids"][0].tolist()
    embeddings, logits = oracle.hear(PARTS[family])
    service = opened(tmp_path, family)
    assert service is not None
    [marker] = service.encoder.placeholder_ids.values()
    assert oracle.tokenizer.convert_ids_to_tokens(marker) == VOICE_FAMILIES[family].marker
    media = []
    for item, places in items_of(inputs, marker):
        found = service.encoder.encode(item, lambda: None)
        assert float(found.features.std()) > 0.01
        assert float((found.features - embeddings[places]).abs().max()) < TOLERANCE
        assert found.num_bytes == item.num_features * service.encoder.feature_bytes
        media.append(RowMedia(places, found.features))
    span = RowSpan(ids, 0, np.zeros(0, np.int32), "all", media=tuple(media))
    spec = spec_of(json.loads((tmp_path / "config.json").read_text()))
    decoder = Decoder(
        spec,
        Weights(tmp_path, torch.float32, CPU, spec.names.prefix),
        TensorParallel(),
        TorchAttention(BLOCK_SIZE, CPU),
    )
    cache = KVCache(
        spec, HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU
    )
    [ours] = step_at_random(decoder, cache, [span], 6, 50, 0)
    assert float((ours - logits).abs().max()) < TOLERANCE
    assert check(tmp_path, None) == []
    [blind] = step_at_random(decoder, cache, [replace(span, media=())], 6, 50, 0)
    assert float((blind - logits).abs().max()) > 1e-2


def test_every_family_is_held_against_transformers() -> None:
    assert {row.architecture for row in VOICE_FAMILIES.values()} == SOUND_FAMILIES.keys()


def test_pauses_are_between_small_parts(tmp_path: Path) -> None:
    save_voice("voxtral", tmp_path)
    service = opened(tmp_path, "voxtral")
    assert service is not None
    pauses: list[None] = []
    mel = torch.zeros(NUM_MEL_BINS, 2 * WINDOW_FRAMES)
    service.encoder.encode(media_of(mel, 60, ()), lambda: pauses.append(None))
    assert len(pauses) > 100


def test_an_estimate_counts_the_tower(tmp_path: Path) -> None:
    model = save_voice("qwen2_audio", tmp_path)
    settings = ModelsSettings(model_id=str(tmp_path), device="cpu", dtype="float32")
    towers = (model.model.audio_tower, model.model.multi_modal_projector)
    expected = 4 * sum(each.numel() for tower in towers for each in tower.parameters())
    with_tower = needs_of(settings, tmp_path).weights
    path = tmp_path / "model.safetensors"
    others = {key: each for key, each in load_file(path).items() if "audio_tower" not in key and "multi_" not in key}
    save_file(others, path)
    alone = needs_of(settings, tmp_path).weights
    assert [a - b for a, b in zip(with_tower, alone, strict=True)] == [expected]


def test_a_shard_without_room_serves_text(tmp_path: Path) -> None:
    save_voice("voxtral", tmp_path)
    assert opened(tmp_path, "voxtral", media_cache_gb=0.0) is None


def test_a_tower_without_a_tensor_is_refused(tmp_path: Path) -> None:
    save_voice("voxtral", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key: each for key, each in load_file(path).items() if "conv1.bias" not in key}, path)
    with pytest.raises(WeightsError, match=r"^the checkpoint lacks tensor audio_tower.conv1.bias"):
        opened(tmp_path, "voxtral")


GOOD = {"qwen2_audio": (25, (100,)), "voxtral": (30, ())}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "an image": ("voxtral", {"kind": MediaKind.IMAGE}, "kind image is not taken by this model"),
    "other bins": ("voxtral", {"shape": (64, 3000)}, r"shape must be 80 and frames, given \[64, 3000\]"),
    "flat": ("voxtral", {"shape": (240000,)}, "shape must be 80 and frames, given"),
    "few bytes": ("voxtral", {"values": b"abc"}, "values must be the 960000 bytes of shape, given 3"),
    "no window": ("voxtral", {"shape": (80, 2999)}, "shape must have a multiple of 3000 frames, given 2999"),
    "two windows": ("qwen2_audio", {"shape": (80, 6000)}, "shape must have 3000 frames, given 6000"),
    "no size": ("qwen2_audio", {"size": ()}, r"size must be one number of frames, 3 to 3000, given \[\]"),
    "nothing heard": ("qwen2_audio", {"size": (2,)}, r"size must be one number of frames, 3 to 3000, given \[2\]"),
    "features": ("qwen2_audio", {"num_features": 24}, "num_features must be 25 for this item, given 24"),
}


@pytest.mark.parametrize("case", BAD)
def test_items_that_do_not_fit_the_model_are_refused(case: str, tmp_path: Path) -> None:
    family, changes, message = BAD[case]
    save_voice(family, tmp_path)
    count, size = GOOD[family]
    good = media_of(torch.zeros(NUM_MEL_BINS, WINDOW_FRAMES), count, size)
    values = bytes(4 * int(np.prod(changes.get("shape", good.shape))))
    service = opened(tmp_path, family)
    assert service is not None
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        service.encode(replace(good, **{"values": values, **changes})).result()
    assert len(service.cache) == 0
    service.encode(good).result()
    assert len(service.cache) == 1
