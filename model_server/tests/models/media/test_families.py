"""Decoders of every family with images: the logits of transformers' whole models, in chunks and token by token."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.stage_boundary import StageBoundary
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec, WholeSpans
from funitel_testing.families import TOLERANCE
from funitel_testing.media_zoo import IMAGES, Pictured, step_at_random
from funitel_testing.stages import Part, on_stages
from funitel_testing.threads import on_ranks

BLOCK_SIZE, NUM_BLOCKS, NUM_DECODE = 4, 260, 6
CPU = torch.device("cpu")
# Text before, between and behind pictures of several sizes; a picture first; text alone; text of one token.
PROMPTS = (
    (5, (16, 16), 3, (24, 16), 1, (16, 32), 11),
    ((32, 16), 2, (16, 16), 8),
    (37,),
    (1, (24, 24), 1 + NUM_DECODE),
)


def spec_in(folder: Path) -> ModelSpec:
    return spec_of(read_json(folder / "config.json"))


def decoder_of(
    folder: Path, spec: ModelSpec, parallel: TensorParallel, link: StageLink | None = None
) -> tuple[Decoder, KVCache]:
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    boundary = None if link is None else StageBoundary(link, torch.float32, CPU)
    decoder = Decoder(spec, weights, parallel, TorchAttention(BLOCK_SIZE, CPU), boundary=boundary)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    cache = KVCache(spec, heads, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    layout = StateLayout.of(spec, parallel.size, parallel.rank)
    if layout is not None:
        cache.state_pool = StatePool(layout, 2 * len(PROMPTS) + 1, CPU)
    return decoder, cache


def stepped(
    folder: Path,
    spans: Sequence[RowSpan],
    most: int = 1000,
    seed: int = 0,
    *,
    parallel: TensorParallel | None = None,
    part: Part = lambda spec: spec,
    link: StageLink | None = None,
) -> list[torch.Tensor]:
    """Logits of every token of sequences, in chunks of at most so many tokens."""
    decoder, cache = decoder_of(folder, part(spec_in(folder)), parallel or TensorParallel(), link)
    return step_at_random(decoder, cache, spans, NUM_DECODE, most, seed)


def worst(found: Sequence[torch.Tensor], wanted: Sequence[Pictured]) -> float:
    return max(float((ours - each.logits).abs().max()) for ours, each in zip(found, wanted, strict=True))


def sequences(name: str, folder: Path, *, is_tied: bool = False, as_published: bool = True) -> list[Pictured]:
    tiny = IMAGES[name]
    model = tiny.save(folder, is_tied=is_tied, as_published=as_published)
    return [tiny.sequence(model, pieces, seed) for seed, pieces in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", IMAGES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Whole prompts, chunks cut anywhere, tokens one by one behind them, beside rows of text; one rank and two."""
    wanted = sequences(name, tmp_path)
    spans = [each.span for each in wanted]
    for size, most, seed in ((1, 1000, 0), (1, 9, 1), (1, 3, 2), (2, 11, 3)):
        work = partial(stepped, tmp_path, spans, most, seed)
        found = on_ranks(size, lambda parallel: work(parallel=parallel))  # noqa: B023
        assert worst(found, wanted) < TOLERANCE
    # Features count: without them logits are others.
    blind = [replace(span, media=()) for span in spans]
    found = stepped(tmp_path, blind)
    assert worst(found[:1], wanted[:1]) > 1e-2
    assert worst(found[2:3], wanted[2:3]) < TOLERANCE


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm", "mistral3", "qwen2_vl"]
)
def test_tensors_have_the_names_of_either_version(name: str, is_tied: bool, tmp_path: Path) -> None:
    wanted = sequences(name, tmp_path, is_tied=is_tied, as_published=False)
    has_head = any("lm_head" in each for each in load_file(tmp_path / "model.safetensors"))
    assert has_head is not is_tied
    found = stepped(tmp_path, [each.span for each in wanted], 20, 4)
    assert worst(found, wanted) < TOLERANCE


@pytest.mark.parametrize(("outer", "inner", "is_tied"), [(False, True, True), (True, False, True), (None, True, True)])
def test_either_config_may_say_that_the_head_is_tied(
    outer: bool | None, inner: bool, is_tied: bool, tmp_path: Path
) -> None:
    IMAGES["llava"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = inner
    config["tie_word_embeddings"] = outer
    assert spec_of(config).is_tied is is_tied
    config["architectures"] = ["SmolVLMForConditionalGeneration"]
    assert spec_of(config).is_tied is (inner if outer is None else outer)


def test_a_text_config_may_leave_out_its_kind(tmp_path: Path) -> None:
    IMAGES["llava"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = spec_of(config)
    del config["text_config"]["model_type"]
    assert spec_of(config) == spec


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_moe"])
def test_the_last_tokens_of_a_picture_see_the_cached_ones(name: str, tmp_path: Path) -> None:
    """As when a prefix of the prompt is cached that ends within a picture."""
    wanted = sequences(name, tmp_path)[0]
    decoder, cache = decoder_of(tmp_path, spec_in(tmp_path), TensorParallel())
    span = replace(wanted.span, block_table=np.arange(1, 60, dtype=np.int32))
    first, last = span.whole_spans[1]
    with torch.inference_mode():
        decoder(ForwardBatch.build([span], BLOCK_SIZE, CPU), cache)
        rest = span.part(first + 2, span.end)
        found = decoder(ForwardBatch.build([rest], BLOCK_SIZE, CPU), cache)
        assert found is not None
        assert worst([found], [Pictured(rest, wanted.logits[first + 2 :])]) < TOLERANCE
        # Its tokens see those behind them in it, or the logits are others.
        causal = replace(span, whole_spans=())
        found = decoder(ForwardBatch.build([causal], BLOCK_SIZE, CPU), cache)
        assert found is not None
        assert float((found - wanted.logits)[first : last - 1].abs().max()) > 1e-2


@pytest.mark.parametrize(("name", "layers"), [("qwen3_vl", (1, 1)), ("gemma4_moe", (2, 3)), ("qwen3_5", (2, 1))])
def test_pipeline_stages_give_the_same(name: str, layers: tuple[int, int], tmp_path: Path) -> None:
    """What is added behind layers is so in the stage that has these."""
    wanted = sequences(name, tmp_path)
    spans = [each.span for each in wanted]

    def work(parallel: TensorParallel, part: Part, link: StageLink) -> list[torch.Tensor]:
        return stepped(tmp_path, spans, 9, 5, parallel=parallel, part=part, link=link)

    assert worst(on_stages(2, 2, work, layers), wanted) < TOLERANCE


def test_specs_say_what_pictures_need(tmp_path: Path) -> None:
    expected = {
        "qwen2_vl": ((1, 1, 2), False, WholeSpans.NONE),
        "qwen3_vl_default_sections": ((3, 3, 2), True, WholeSpans.NONE),
        "gemma3": ((), False, WholeSpans.ALL),
        "gemma4": ((), False, WholeSpans.WINDOWS),
        "gemma4_causal": ((), False, WholeSpans.NONE),
        "llava": ((), False, WholeSpans.NONE),
    }
    for name, wanted in expected.items():
        IMAGES[name].build().config.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        spec = spec_of({**config, "architectures": [f"{IMAGES[name].kind}ForConditionalGeneration"]})
        assert (spec.rotary.sections, spec.rotary.has_mixed_sections, spec.whole_spans) == wanted


def test_a_placeholder_may_be_beyond_the_vocabulary(tmp_path: Path) -> None:
    wanted = sequences("gemma3", tmp_path)[0]
    tokens = np.array(wanted.span.tokens)
    for item in wanted.span.media:
        tokens[item.places] = 10**6
    span = replace(wanted.span, tokens=tokens.tolist())
    found = stepped(tmp_path, [span])
    assert worst(found, [wanted]) < TOLERANCE


def test_other_tensors_than_those_of_towers_are_refused(tmp_path: Path) -> None:
    IMAGES["smolvlm"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.text_model.layers.0.stranger.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(Exception, match="1 tensors the model does not know: model.layers.0.stranger.weight"):
        decoder_of(tmp_path, spec_in(tmp_path), TensorParallel())
