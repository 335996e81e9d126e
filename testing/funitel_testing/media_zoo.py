"""A tiny random checkpoint of every family of models for images, its pictures, and what transformers computes of them.

Texts are those of the zoo: heads that do not divide evenly between ranks, windows shorter than an image.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from funitel.model_server.forward.batch import Forward, ForwardBatch, RowMedia, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel_testing.zoo import HIDDEN, VOCAB_SIZE, ZOO

PLACEHOLDER = VOCAB_SIZE - 1
_NUM_WORDS = VOCAB_SIZE - 4  # ids behind them stand for pictures, films and sounds, or where these begin and end
NO_BLOCKS = np.zeros(0, np.int32)
Sizes = Sequence[tuple[int, int]]  # height and width of each picture, in pixels
Inputs = dict[str, torch.Tensor]

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARES = {**_TOWER, "image_size": 16, "patch_size": 4}
_PIXTRAL = {**_TOWER, "image_size": 32, "patch_size": 4, "head_dim": 8}
_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = {**_QWEN, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": HIDDEN, "num_position_embeddings": 16}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def squares(config: Any, sizes: Sizes) -> Inputs:
    """A tile of 16 pixels in the square for each picture, whatever its size."""
    return {"pixel_values": _pixels(len(sizes), 3, 16, 16)}


def _rows_of_squares(config: Any, sizes: Sizes) -> Inputs:
    return {"pixel_values": _pixels(1, len(sizes), 3, 16, 16)}


def _any_size(config: Any, sizes: Sizes) -> Inputs:
    """Pictures of their sizes, padded to the largest."""
    high, wide = (max(size[i] for size in sizes) for i in (0, 1))
    return {"pixel_values": _pixels(len(sizes), 3, high, wide), "image_sizes": torch.tensor(sizes)}


def _cut_into_tiles(config: Any, sizes: Sizes) -> Inputs:
    """The picture as one tile, and tiles of it as many as its best grid has."""
    return {"pixel_values": _pixels(len(sizes), 5, 3, 16, 16), "image_sizes": torch.tensor(sizes)}


def _patches(config: Any, sizes: Sizes) -> Inputs:
    """Patches of all pictures, and how many rows and columns of them each has."""
    patch = config.vision_config.patch_size
    grids = torch.tensor([[1, height // patch, width // patch] for height, width in sizes])
    return {"pixel_values": _pixels(int(grids.prod(-1).sum()), 3 * 2 * patch * patch), "image_grid_thw": grids}


def _placed_patches(config: Any, sizes: Sizes) -> Inputs:
    """Patches of each picture with their places, padded to the largest."""
    patch = config.vision_config.patch_size
    grids = [(height // patch, width // patch) for height, width in sizes]
    most = max(rows * columns for rows, columns in grids)
    places = torch.full((len(sizes), most, 2), -1)
    for line, (rows, columns) in zip(places, grids, strict=True):
        line[: rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return {"pixel_values": _pixels(len(sizes), most, 3 * patch * patch), "image_position_ids": places}


@dataclass(frozen=True, slots=True, eq=False)
class Pictured:
    """Tokens of a sequence, what stands in the place of some, and the logits [num_tokens, vocab_size] of it all."""

    span: RowSpan  # all tokens, without blocks
    logits: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TinyImages:
    """One family.

    `text` is a checkpoint of the zoo and `more` what its config has besides. `see` makes the inputs of pictures, and
    `marks` names the argument that says which tokens are of pictures, if there is one.
    """

    kind: str  # transformers' name without ForConditionalGeneration
    text: str
    tower: Mapping[str, Any]
    see: Callable[[Any, Sizes], Inputs] = squares
    more: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    marks: str = ""
    sees_whole: bool = False
    token_key: str = "image_token_id"

    def build(self, *, is_tied: bool = False) -> Any:
        """The model in transformers, its weights as large as those of the zoo."""
        given = dict(ZOO[self.text].config) | {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
        config = getattr(transformers, f"{self.kind}Config")(
            text_config=given | dict(self.more) | {"tie_word_embeddings": is_tied},
            vision_config=dict(self.tower),
            tie_word_embeddings=is_tied,
            **{self.token_key: PLACEHOLDER},
            **self.outer,
        )
        config._attn_implementation = "eager"
        config.text_config._experts_implementation = "eager"
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.kind}ForConditionalGeneration")(config).float().eval()
        with torch.no_grad():
            for label, parameter in model.named_parameters():
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(parameter + noise if "norm" in label else noise)
            for label, buffer in model.named_buffers():
                if "layer_scalar" in label:
                    buffer.add_(torch.randn_like(buffer) * 0.2)
        return model

    def save(self, folder: Path, *, is_tied: bool = False, as_published: bool = True) -> Any:
        """Save the checkpoint; returns the model."""
        model = self.build(is_tied=is_tied)
        model.save_pretrained(folder, save_original_format=as_published)
        return model

    @torch.inference_mode()
    def sequence(self, model: Any, pieces: Sequence[int | tuple[int, int]], seed: int = 0) -> Pictured:
        """A sequence of so many tokens of text, or of a picture of so many pixels, one piece after the other."""
        generator = torch.Generator().manual_seed(seed)
        sizes = [piece for piece in pieces if isinstance(piece, tuple)]
        inputs = self.see(model.config, sizes) if sizes else {}
        counts = iter(self.num_features(model, inputs) if sizes else ())
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece in pieces:
            if isinstance(piece, tuple):
                spans.append((len(tokens), len(tokens) + next(counts)))
                tokens += [PLACEHOLDER] * (spans[-1][1] - spans[-1][0])
            else:
                tokens += torch.randint(0, _NUM_WORDS, (piece,), generator=generator).tolist()
        assert next(counts, None) is None
        ids = torch.tensor([tokens])
        if self.marks:
            inputs[self.marks] = (ids == PLACEHOLDER).int()
        heard: dict[str, Any] = {}
        decoder = next(each for each in model.modules() if hasattr(each, "embed_tokens") and hasattr(each, "layers"))
        hook = decoder.register_forward_pre_hook(lambda _, args, given: heard.update(given), with_kwargs=True)
        logits = model(input_ids=ids, **inputs).logits[0]
        hook.remove()
        media = self._media(heard, spans)
        rotary = heard.get("position_ids")
        axes = None if rotary is None or rotary.dim() < 3 or not sizes else rotary[-3:, 0].numpy()
        whole = tuple(spans) if self.sees_whole else ()
        span = RowSpan(tokens, 0, NO_BLOCKS, "all", media=media, rotary=axes, whole_spans=whole)
        return Pictured(span, logits)

    def num_features(self, model: Any, inputs: Inputs) -> list[int]:
        """Features of each picture."""
        found = model.get_image_features(**inputs, return_dict=True)
        if self.kind == "Llama4":
            return [each.shape[0] for each in found.last_hidden_state]
        if self.see is _rows_of_squares:
            num_pictures = inputs["pixel_values"].shape[1]
            return [len(found.pooler_output[0]) // num_pictures] * num_pictures
        return [int(np.prod(each.shape[:-1])) for each in found.pooler_output]

    def _media(self, heard: Mapping[str, Any], spans: Sequence[tuple[int, int]]) -> tuple[RowMedia, ...]:
        """Features as transformers has put them among the embeddings, and those that it adds behind layers."""
        features, media, at = heard["inputs_embeds"][0], [], 0
        for begin, end in spans:
            deep = [each[at : at + end - begin] for each in heard.get("deepstack_visual_embeds") or ()]
            media.append(RowMedia(np.arange(begin, end), features[begin:end], tuple(deep)))
            at += end - begin
        return tuple(media)


def _qwen(kind: str, text: str, tower: Mapping[str, Any], sections: list[int], **more: Any) -> TinyImages:
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e4}
    return TinyImages(
        kind=kind,
        text=text,
        tower=tower,
        see=_patches,
        more={"rope_parameters": rope, **more},
        outer={"video_token_id": 286, "vision_start_token_id": 285, "vision_end_token_id": 284},
        marks="mm_token_type_ids",
    )


def _gemma4(text: str, sees: str | None, **more: Any) -> TinyImages:
    return TinyImages(
        kind="Gemma4",
        text=text,
        tower={**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
        | {"position_embedding_size": 16},
        see=_placed_patches,
        more={"use_bidirectional_attention": sees, "pad_token_id": 3, **more},
        outer={"video_token_id": 286, "audio_token_id": 285},
        marks="mm_token_type_ids",
        sees_whole=sees is not None,
    )


_TILES = {"image_grid_pinpoints": _PINPOINTS}
IMAGES: Mapping[str, TinyImages] = {
    "llava": TinyImages(
        kind="Llava", text="llama", more={"model_type": "llama"}, tower={**_SQUARES, "model_type": "clip_vision_model"}
    ),
    "pixtral": TinyImages(
        kind="Llava",
        text="mistral",
        more={"model_type": "mistral"},
        tower={**_PIXTRAL, "model_type": "pixtral"},
        see=_any_size,
        outer={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": TinyImages(
        kind="LlavaNext",
        text="mistral",
        more={"model_type": "mistral"},
        tower={**_SQUARES, "model_type": "clip_vision_model"},
        see=_cut_into_tiles,
        outer=_TILES,
    ),
    "llava_onevision": TinyImages(
        kind="LlavaOnevision",
        text="qwen2",
        more={"model_type": "qwen2"},
        tower={**_SQUARES, "model_type": "siglip_vision_model", "vision_use_head": False},
        see=_cut_into_tiles,
        outer={**_TILES, "vision_aspect_ratio": "anyres_max_2"},
    ),
    "internvl": TinyImages(
        kind="InternVL",
        text="qwen3",
        more={"model_type": "qwen3"},
        tower={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
    ),
    "internvl_moe": TinyImages(
        kind="InternVL",
        text="qwen3_moe",
        more={"model_type": "qwen3_moe"},
        tower={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
    ),
    "idefics3": TinyImages(
        kind="Idefics3",
        text="llama",
        more={"model_type": "llama"},
        tower=_SQUARES,
        see=_rows_of_squares,
        outer={"scale_factor": 2},
    ),
    "smolvlm": TinyImages(
        kind="SmolVLM",
        text="llama",
        more={"model_type": "llama"},
        tower=_SQUARES,
        see=_rows_of_squares,
        outer={"scale_factor": 2},
    ),
    "mistral3": TinyImages(
        kind="Mistral3",
        text="ministral3",
        more={"model_type": "ministral3"},
        tower={**_PIXTRAL, "model_type": "pixtral"},
        see=_any_size,
    ),
    "qwen2_vl": _qwen("Qwen2VL", "qwen2", {**_QWEN, "embed_dim": 16, "hidden_size": HIDDEN}, [1, 1, 2]),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL",
        "qwen2",
        {**_QWEN, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": HIDDEN}
        | {"window_size": 16, "fullatt_block_indexes": [1]},
        [2, 1, 1],
    ),
    "qwen3_vl": _qwen("Qwen3VL", "qwen3", {**_QWEN3, "deepstack_visual_indexes": [0, 1]}, [3, 3, 2]),
    "qwen3_vl_default_sections": _qwen("Qwen3VL", "qwen3", {**_QWEN3, "deepstack_visual_indexes": [1]}, [24, 20, 20]),
    "qwen3_vl_moe": _qwen("Qwen3VLMoe", "qwen3_moe", {**_QWEN3, "deepstack_visual_indexes": [0]}, [4, 2, 2]),
    "qwen3_5": _qwen("Qwen3_5", "qwen3_5", _QWEN3, [1, 1, 0]),
    "qwen3_5_moe": _qwen("Qwen3_5Moe", "qwen3_5_moe", _QWEN3, [1, 1, 0]),
    "gemma3": TinyImages(
        kind="Gemma3",
        text="gemma3",
        more={"sliding_window": 3},
        tower={**_SQUARES, "vision_use_head": False},
        outer={"mm_tokens_per_image": 16},
        marks="token_type_ids",
        sees_whole=True,
    ),
    "gemma4": _gemma4("gemma4_shared", "vision", sliding_window=3),
    "gemma4_causal": _gemma4("gemma4", None),
    "gemma4_moe": _gemma4("gemma4_moe", "vision", sliding_window=3),
    "llama4": TinyImages(
        kind="Llama4",
        text="llama4",
        tower={**_SQUARES, "intermediate_size": 64, "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
    ),
}
"""By what the family, or a model of it that differs, is called in tests."""


def _tables(spans: Sequence[RowSpan], num_blocks: int) -> list[np.ndarray]:
    blocks = np.random.default_rng(3).permutation(np.arange(1, num_blocks)).astype(np.int32)
    return np.split(blocks[: len(blocks) // len(spans) * len(spans)], len(spans))


def _end_of_chunk(span: RowSpan, begin: int, wanted: int) -> int:
    """Where a chunk ends that would like to: behind a picture that is seen whole, if it is within one."""
    cut = (last for first, last in span.whole_spans if max(first, begin) < wanted < last)
    return next(cut, wanted)


@torch.inference_mode()
def step_at_random(
    decoder: Forward, cache: KVCache, spans: Sequence[RowSpan], num_decode: int, most: int, seed: int
) -> list[torch.Tensor]:
    """Logits of every token of sequences, which step together and join late; see `forward_worker.step_at_random`.

    Chunks have at most so many tokens, but for one that ends behind a picture which is seen whole; the last
    `num_decode` tokens are computed one by one.
    """
    chosen, tables = random.Random(seed), _tables(spans, cache.num_blocks)
    joins = [0, *(chosen.randint(0, 3) for _ in spans[1:])]
    done, step = [0] * len(spans), 0
    collected: list[list[torch.Tensor]] = [[] for _ in spans]
    while any(d < span.end for d, span in zip(done, spans, strict=True)):
        rows, owners = [], []
        for i, span in enumerate(spans):
            left = span.end - num_decode - done[i]
            if step < joins[i] or done[i] == span.end:
                continue
            end = done[i] + (min(chosen.randint(1, most), left) if left > 0 else 1)
            whole = replace(span, block_table=tables[i], state_slot=i + 1, prompt_len=span.end - num_decode)
            rows.append(whole.part(done[i], _end_of_chunk(span, done[i], end)))
            owners.append(i)
        step += 1
        if not rows:
            continue
        out = decoder(ForwardBatch.build(rows, cache.block_size, torch.device("cpu")), cache)
        at = 0
        for i, row in zip(owners, rows, strict=True):
            done[i] = row.end
            if out is not None:
                collected[i].append(out[at : at + len(row.tokens)])
                at += len(row.tokens)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in collected]
