"""The fused step on sequences with images: logits of transformers, and a row's bits in company and in chunks."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.cpu import build as building
from funitel.model_server.cpu import shared_memory_ranks as shared
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.precision import KvKind, Tier
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowMedia, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import (
    LatentSpec,
    ModelSpec,
    NormPlacement,
    Position,
    RotaryScaling,
    RotarySpec,
    WholeSpans,
)
from funitel.model_server.spec.tensor_names import TensorNames
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder, fused_library, sets_that_add_alike
from funitel_testing.media_rows import Piece, make_sequence, step_sequences
from funitel_testing.random_weights import RandomWeights
from funitel_testing.stages import on_stages
from funitel_testing.threads import on_ranks
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_blocks import SIZES, add_blocks, values_of
from funitel_testing.zoo import ZOO

pytestmark = pytest.mark.skipif("avx2" not in building.cpu_flags(), reason="needs AVX2")

NUM_DECODE = 5
Change = Callable[[ModelSpec], ModelSpec]
Oracle = Callable[[Path, RowSpan], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of models with images: a checkpoint of its text model, and how transformers computes that."""

    save: Callable[[Path], object]
    oracle: Oracle
    change: Change = lambda spec: spec
    num_deep: int = 0
    has_axes: bool = False
    sees_whole: bool = False

    def sequence(self, folder: Path, seed: int, *pieces: Piece) -> RowSpan:
        kinds = {"num_deep": self.num_deep, "has_axes": self.has_axes, "sees_whole": self.sees_whole}
        return make_sequence(pieces, read_json(folder / "config.json")["hidden_size"], seed, **kinds)


def embedded(table: torch.Tensor, sequence: RowSpan) -> torch.Tensor:
    """Embeddings [1, num_tokens, hidden_size] with features in place of some."""
    x = table[torch.tensor(sequence.tokens)].clone()
    for image in sequence.media:
        x[torch.from_numpy(image.places)] = image.features
    return x[None]


def by_axes(kind: type[Any], config: type[Any], rope: dict[str, Any], folder: Path, sequence: RowSpan) -> Any:
    """A text model with positions by axis, of a checkpoint of the same layers without."""
    given = read_json(folder / "config.json") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | rope}
    given.pop("architectures"), given.pop("model_type")
    model = kind(config(**given)).float().eval()
    has_blocks = (folder / POINTER).exists()
    tensors = values_of(folder) if has_blocks else load_file(folder / "model.safetensors")
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    model.load_state_dict(own)
    return hidden_by_axes(model, sequence) @ tensors["lm_head.weight"].T


def hidden_by_axes(model: Any, sequence: RowSpan) -> torch.Tensor:
    num_tokens = len(sequence.tokens)
    positions = np.tile(np.arange(num_tokens), (3, 1)) if sequence.rotary is None else sequence.rotary
    further = {}
    if any(image.deep for image in sequence.media):
        is_image = torch.zeros(1, num_tokens, dtype=torch.bool)
        is_image[0, np.concatenate([image.places for image in sequence.media])] = True
        deep = [torch.cat(parts) for parts in zip(*(image.deep for image in sequence.media), strict=True)]
        further = {"visual_pos_masks": is_image, "deepstack_visual_embeds": deep}
    x = embedded(model.embed_tokens.weight, sequence)
    answer = model(inputs_embeds=x, position_ids=torch.from_numpy(positions)[:, None], **further)
    hidden: torch.Tensor = answer.last_hidden_state[0]
    return hidden


def by_features(folder: Path, sequence: RowSpan) -> torch.Tensor:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    return model(inputs_embeds=embedded(model.model.embed_tokens.weight, sequence)).logits[0]


def by_spans(folder: Path, sequence: RowSpan) -> torch.Tensor:
    model = transformers.Gemma3ForCausalLM.from_pretrained(folder).eval()
    table = model.model.embed_tokens.weight * model.model.embed_tokens.embed_scale
    x = embedded(table, sequence)
    owners = torch.full((1, len(sequence.tokens)), -1)
    for number, (begin, end) in enumerate(sequence.whole_spans):
        owners[0, begin:end] = number
    masks = create_masks_for_vision_model(model.config, x, None, None, None, owners)
    return model(inputs_embeds=x, attention_mask=masks).logits[0]


def turned(sections: tuple[int, ...], is_mixed: bool, spec: ModelSpec) -> ModelSpec:
    return replace(spec, rotary=replace(spec.rotary, sections=sections, has_mixed_sections=is_mixed))


def save_gemma3(folder: Path) -> None:
    ZOO["gemma3"].save(folder)


QWEN2_VL = {"mrope_section": [2, 3, 3]}
QWEN3_VL = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
LONG = {"max_position_embeddings": 1024}
FAMILIES = {
    "llava": Family(save=lambda folder: save_tiny("llama", folder, **LONG), oracle=by_features),
    "qwen2_vl": Family(
        save=lambda folder: save_tiny("qwen2", folder, num_attention_heads=3, num_key_value_heads=1, **LONG),
        oracle=partial(by_axes, Qwen2VLTextModel, transformers.Qwen2VLTextConfig, QWEN2_VL),
        change=partial(turned, (2, 3, 3), False),
        has_axes=True,
    ),
    "qwen3_vl": Family(
        save=lambda folder: save_tiny("qwen3", folder, **LONG),
        oracle=partial(by_axes, Qwen3VLTextModel, transformers.Qwen3VLTextConfig, QWEN3_VL),
        change=partial(turned, (3, 3, 2), True),
        num_deep=2,
        has_axes=True,
    ),
    "gemma3": Family(
        save=save_gemma3,
        oracle=by_spans,
        change=lambda spec: replace(spec, whole_spans=WholeSpans.ALL),
        sees_whole=True,
    ),
}
EACH = pytest.mark.parametrize("name", FAMILIES)
TOLERANCE = {Tier.FLOAT32: 1e-5, Tier.FLOAT16: 5e-3, Tier.BFLOAT16: 5e-2, Tier.INT8: 0.1}
# Images that begin a sequence, follow each other, are cut by chunks of 11, are larger than a window; and text alone.
PIECES: tuple[tuple[Piece, ...], ...] = (
    (7, (1, 5, 6), 9),
    ((1, 2, 3), (2, 2, 4), 31, (1, 1, 2), 6),
    (23,),
    (40, (1, 1, 1), 2, (1, 6, 4), 12),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with the checkpoints of the families, each saved once."""

    @cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        FAMILIES[name].save(folder)
        return folder

    return save


def sequences_of(name: str, folder: Path, pieces: Sequence[Sequence[Piece]] = PIECES) -> list[RowSpan]:
    return [FAMILIES[name].sequence(folder, seed, *each) for seed, each in enumerate(pieces)]


def logits_of(
    name: str,
    folder: Path,
    sequences: Sequence[RowSpan],
    *,
    tier: Tier = Tier.FLOAT32,
    parallel: TensorParallel | None = None,
    chunk: int = 11,
    num_decode: int = NUM_DECODE,
    link: StageLink | None = None,
    part: Change = lambda spec: spec,
    **options: Any,
) -> list[torch.Tensor]:
    family, parallel = FAMILIES[name], parallel or TensorParallel()
    decoder = fused_decoder(folder, tier, parallel, part=lambda spec: part(family.change(spec)), link=link, **options)
    return step_sequences(decoder, cache_for(decoder, parallel), sequences, num_decode, chunk)


def cache_for(decoder: FusedDecoder, parallel: TensorParallel) -> KVCache:
    spec = decoder._spec
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    return KVCache(spec, heads, 4000 // decoder.block_size, decoder.block_size, decoder.kv_dtype, CPU)


def expected_of(name: str, folder: Path, sequences: Sequence[RowSpan]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [FAMILIES[name].oracle(folder, sequence) for sequence in sequences]


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    ours, theirs = torch.cat(list(found)), torch.cat(list(expected))
    return ((ours - theirs).norm() / theirs.norm()).item()


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# Transformers ---------------------------------------------------------------------------------------------------------


@EACH
def test_logits_are_those_of_transformers_on_one_rank_and_on_two(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    assert missing(FAMILIES[name].change(spec_of(read_json(folder / "config.json")))) is None
    sequences = sequences_of(name, folder)
    expected = expected_of(name, folder, sequences)
    for tier, tolerance in TOLERANCE.items():
        for size in (1, 2):
            work = partial(logits_of, name, folder, sequences, tier=tier)
            found = on_ranks(size, lambda parallel, work=work: work(parallel=parallel))
            assert error(found, expected) < tolerance, (tier, size)


@EACH
def test_a_text_between_images_depends_on_them(name: str, saved: Callable[[str], Path]) -> None:
    """What is compared with transformers would show a feature or a position that is not used."""
    folder = saved(name)
    [sequence] = sequences_of(name, folder, [PIECES[1]])
    without = replace(sequence, media=(), whole_spans=())
    changed = [replace(sequence, rotary=None), replace(sequence, whole_spans=())]
    changed.append(replace(sequence, media=tuple(replace(image, deep=()) for image in sequence.media)))
    found, *others = (torch.cat(logits_of(name, folder, [each])) for each in (sequence, without, *changed))
    family = FAMILIES[name]
    has_own = (True, family.has_axes, family.sees_whole, family.num_deep > 0)
    for is_used, other in zip(has_own, others, strict=True):
        assert torch.equal(found, other) is not is_used


@EACH
def test_contexts_of_several_parts_are_those_of_transformers(name: str, saved: Callable[[str], Path]) -> None:
    """Attention sums contexts by parts of 256 tokens: here a span crosses two of their borders."""
    folder = saved(name)
    sequences = sequences_of(name, folder, [(200, (1, 18, 20), 30), (300,)])
    expected = expected_of(name, folder, sequences)
    found = logits_of(name, folder, sequences, chunk=128, num_decode=12)
    assert error(found, expected) < 1e-4
    for block_size in (1, 48):
        others = logits_of(name, folder, sequences, chunk=97, num_decode=20, block_size=block_size)
        assert error(others, expected) < 1e-4


def test_ranks_that_sum_in_shared_memory_give_the_same(saved: Callable[[str], Path]) -> None:
    folder, library = saved("qwen3_vl"), fused_library()
    sequences = sequences_of("qwen3_vl", folder)
    fd, address = shared._make(int(library.funitel_ranks_bytes(2)))
    assert fd is not None

    def work(parallel: TensorParallel) -> list[torch.Tensor]:
        handle = library.funitel_ranks(shared._open(address), parallel.rank, 2, 20_000)
        ranks = SharedMemoryRanks(parallel.rank, 2, library, handle)
        return logits_of("qwen3_vl", folder, sequences, parallel=ranks)

    found = on_ranks(2, work)
    os.close(fd)
    assert error(found, expected_of("qwen3_vl", folder, sequences)) < 1e-5


def test_later_pipeline_stages_know_positions_spans_and_the_layers_of_deep_features(
    saved: Callable[[str], Path],
) -> None:
    for name in ("qwen3_vl", "gemma3"):
        folder = saved(name)
        sequences = sequences_of(name, folder)

        def work(parallel: TensorParallel, part: Change, link: StageLink, name: str = name) -> list[torch.Tensor]:
            return logits_of(name, saved(name), sequences_of(name, saved(name)), part=part, link=link)

        found = on_stages(2, 1, work, [1, len_of(folder) - 1])
        assert error(found, expected_of(name, folder, sequences)) < 1e-5


def len_of(folder: Path) -> int:
    return int(read_json(folder / "config.json")["num_hidden_layers"])


def test_a_mixture_whose_stacks_lie_by_inputs_takes_images_too(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE is published: stacks are [experts, in, out]."""
    turns = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
    text = dict(ZOO["qwen3_moe"].config) | {"eos_token_id": 256, "pad_token_id": None, **turns}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
    sight |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=sight)
    config.text_config._experts_implementation = "eager"
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path, save_original_format=True)
    spec = spec_of(read_json(tmp_path / "config.json"))
    assert (missing(spec), spec.names.is_stack_transposed) == (None, True)
    kinds = {"num_deep": 2, "has_axes": True}
    sequences = [make_sequence(each, spec.hidden_size, seed, **kinds) for seed, each in enumerate(PIECES)]
    with torch.inference_mode():
        language = model.model.language_model
        expected = torch.cat([model.lm_head(hidden_by_axes(language, each)) for each in sequences])
    for tier, size in ((Tier.FLOAT32, 1), (Tier.FLOAT32, 2), (Tier.INT8, 1)):

        def logits(parallel: TensorParallel, tier: Tier = tier) -> torch.Tensor:
            decoder = fused_decoder(tmp_path, tier, parallel)
            return torch.cat(step_sequences(decoder, cache_for(decoder, parallel), sequences, NUM_DECODE))

        found = on_ranks(size, logits)
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < TOLERANCE[tier], (tier, size)  # rounding may send a token to another expert
        assert tier is Tier.INT8 or errors.max() < 1e-4


# The torch decoder ----------------------------------------------------------------------------------------------------

PLAIN = ModelSpec(
    architecture="Test",
    vocab_size=51,
    hidden_size=45,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=22,
    intermediate_size=37,
    max_position_embeddings=128,
)
MIXED = RotarySpec(dims=12, sections=(2, 2, 2), has_mixed_sections=True)
SPECS = {
    "embeddings scaled and normalised, positions learned": replace(
        PLAIN,
        position=Position.LEARNED,
        embedding_scale=3.0,
        names=TensorNames(positions="positions", embedding_norm="entrance"),
    ),
    "neighbours as pairs, stretched, in layers with a window and without": replace(
        PLAIN,
        rotary=replace(MIXED, is_interleaved=True, scaling=RotaryScaling(kind="yarn", factor=4.0, amplitude=1.3)),
        window_rotary=RotarySpec(base=500.0, sections=(5, 0, 6)),
        sliding_windows=(9, None, 5),
        unrotated_layers=(1,),
        attention_softcap=2.0,
        is_parallel=True,
        whole_spans=WholeSpans.WINDOWS,
    ),
    "slopes from a token to those behind it": replace(
        PLAIN,
        position=Position.ALIBI,
        whole_spans=WholeSpans.ALL,
        norm_placement=NormPlacement.BOTH,
        names=TensorNames(attention_post_norm="layers.{i}.after", mlp_post_norm="layers.{i}.last"),
    ),
    "latents": replace(
        PLAIN,
        rotary=replace(MIXED, dims=6, sections=(1, 1, 1)),
        head_dim=18,
        num_kv_heads=1,
        latent=LatentSpec(rank=20, value_dim=10),
        sliding_windows=(None, 9, 5),
        whole_spans=WholeSpans.ALL,
        names=TensorNames(
            kv_down="layers.{i}.kv_down", kv_latent_norm="layers.{i}.kv_latent_norm", kv_up="layers.{i}.kv_up"
        ),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_torch_decoder(name: str) -> None:
    spec = SPECS[name]
    assert missing(spec) is None
    kinds = {"num_deep": 2, "has_axes": True, "sees_whole": True, "placeholder": 50}
    sequences = [make_sequence(each, spec.hidden_size, seed, **kinds) for seed, each in enumerate(PIECES)]

    def logits(parallel: TensorParallel, tier: Tier | None) -> torch.Tensor:
        decoder: Forward = Decoder(spec, RandomWeights(), parallel, TorchAttention(BLOCK_SIZE, CPU))
        if tier is not None:
            sizes = {"block_size": BLOCK_SIZE, "num_threads": 1}
            decoder = FusedDecoder(spec, RandomWeights(), parallel, fused_library(), tier=tier, **sizes)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        pool = KVCache(spec, heads, 120, BLOCK_SIZE, torch.float32, CPU)
        return torch.cat(step_sequences(decoder, pool, sequences, 3))

    expected = logits(TensorParallel(), None)
    for size in (1, 2):
        assert error([on_ranks(size, lambda parallel: logits(parallel, Tier.FLOAT32))], [expected]) < 1e-5


# A row's bits ---------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("tier", TOLERANCE, ids=lambda tier: tier.label)
def test_a_row_has_the_same_bits_alone_in_company_and_in_any_chunks(
    name: str, tier: Tier, saved: Callable[[str], Path]
) -> None:
    folder = saved(name)
    sequences = sequences_of(name, folder)
    expected = logits_of(name, folder, sequences, tier=tier)
    assert_same_bits([logits_of(name, folder, [each], tier=tier)[0] for each in sequences], expected)
    for chunk, num_threads in ((1, 1), (2, 2), (13, 5), (100, 2)):
        others = logits_of(name, folder, sequences, tier=tier, chunk=chunk, num_threads=num_threads)
        assert_same_bits(others, expected)
    best, *_ = groups = sets_that_add_alike(tier)
    for names in groups:
        found = [logits_of(name, folder, sequences, tier=tier, instruction_set=each) for each in names]
        for each in found:
            assert_same_bits(each, expected if names is best else found[0])


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
@pytest.mark.parametrize("kind", KvKind, ids=lambda kind: kind.label)
def test_every_kind_of_pool_takes_spans_and_turned_keys(kind: KvKind, name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    sequences = sequences_of(name, folder, [*PIECES, (250, (1, 5, 4), 9)])
    options = {"kv_kind": kind, "block_size": 8}
    found = logits_of(name, folder, sequences, **options)
    assert_same_bits([logits_of(name, folder, [each], **options)[0] for each in sequences], found)
    assert_same_bits(logits_of(name, folder, sequences, chunk=64, **options), found)
    tolerance = {KvKind.FLOAT32: 1e-5, KvKind.FLOAT16: 5e-3, KvKind.BFLOAT16: 3e-2, KvKind.INT8: 3e-2}.get(kind, 0.3)
    assert error(found, expected_of(name, folder, sequences)) < tolerance


def test_blocks_of_a_gguf_are_no_special_case(tmp_path: Path) -> None:
    folder = add_blocks(save_tiny("qwen3", tmp_path, **SIZES), lambda name: "Q8_0")
    sequences = sequences_of("qwen3_vl", folder)
    expected = logits_of("qwen3_vl", folder, sequences, tier=Tier.GGUF)
    assert error(expected, expected_of("qwen3_vl", folder, sequences)) < TOLERANCE[Tier.INT8]
    alone = [logits_of("qwen3_vl", folder, [each], tier=Tier.GGUF, chunk=30)[0] for each in sequences]
    assert_same_bits(alone, expected)


def test_text_keeps_its_bits_beside_images_and_what_they_hold_does_not_reach_it(saved: Callable[[str], Path]) -> None:
    for name in FAMILIES:
        folder = saved(name)
        sequences = sequences_of(name, folder)
        [alone] = logits_of(name, folder, sequences[2:3])
        poison = torch.full_like(sequences[0].media[0].features, torch.nan)
        poisoned = replace(sequences[0], media=(replace(sequences[0].media[0], features=poison),))
        beside = logits_of(name, folder, [poisoned, *sequences[1:]])
        assert torch.equal(beside[2], alone)
        assert beside[0].isnan().any()


def test_the_rest_of_a_span_is_computed_as_with_its_cached_beginning(saved: Callable[[str], Path]) -> None:
    folder = saved("gemma3")
    [sequence] = sequences_of("gemma3", folder, [PIECES[0]])
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), part=FAMILIES["gemma3"].change)
    pool = cache_for(decoder, TensorParallel())
    sequence = replace(sequence, block_table=np.arange(1, 41, dtype=np.int32))

    def step(begin: int, end: int) -> torch.Tensor:
        found = decoder(ForwardBatch.build([sequence.part(begin, end)], BLOCK_SIZE, CPU), pool)
        assert found is not None
        return found

    whole = step(0, 40)
    for begin in (8, 20, 36):
        assert torch.equal(step(begin, 40), whole[begin:])


def test_features_of_any_precision_are_taken_as_numbers(saved: Callable[[str], Path]) -> None:
    folder = saved("qwen3_vl")
    [sequence] = sequences_of("qwen3_vl", folder, [PIECES[0]])

    def converted(*dtypes: torch.dtype) -> RowSpan:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            for dtype in dtypes:
                tensor = tensor.to(dtype)
            return tensor

        kept = [RowMedia(each.places, change(each.features), tuple(map(change, each.deep))) for each in sequence.media]
        return replace(sequence, media=tuple(kept))

    for dtype in (torch.bfloat16, torch.float16):
        exact = logits_of("qwen3_vl", folder, [converted(dtype, torch.float32)])
        assert_same_bits(logits_of("qwen3_vl", folder, [converted(dtype)]), exact)
