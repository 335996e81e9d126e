"""Where keys and values lie in a block: sizes by layer, layers that share, and the keys of indexers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.kv_cache.layout import BlockLayout
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.json_file import from_json

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {
    "architecture": "Test",
    "vocab_size": 10,
    "hidden_size": 8,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "position": "none",
}
OWN: list[dict[str, int]] = [{}, {"head_dim": 8, "num_kv_heads": 2}, {"kv_source": 0}, {}]


@pytest.mark.parametrize(("size", "rank", "heads"), [(1, 0, (3, 2)), (2, 0, (2, 1)), (2, 1, (1, 1)), (3, 2, (1, 1))])
def test_layers_lie_one_after_the_other_with_the_heads_of_their_rank(
    size: int, rank: int, heads: tuple[int, int]
) -> None:
    spec = from_json(json.dumps(PLAIN | {"layers": OWN}), "spec")
    split = HeadSplit.of(spec.num_heads, spec.num_kv_heads, size, rank)
    cache = KVCache(spec, split, 5, 16, torch.float32, CPU)
    shapes = [tuple(cache.keys[i].shape[2:]) for i in range(4)]
    assert shapes == [(heads[0], 4), (heads[1], 8), (heads[0], 4), (heads[0], 4)]
    per_token = 2 * (2 * heads[0] * 4 + heads[1] * 8)  # keys and values; the third layer has none
    assert KVCache.bytes_per_block(spec, split, 16, torch.float32) == 16 * per_token * 4
    assert cache.num_bytes == 5 * 16 * per_token * 4
    for layer in (0, 1, 3):
        for cached in (cache.keys[layer], cache.values[layer]):
            assert not cached.any()  # no two lie at the same place
            cached.fill_(layer + 1.0)
    assert cache.pool.all()
    assert cache.keys[2].data_ptr() == cache.keys[0].data_ptr()
    cache.wipe([1])
    assert not cache.pool[1].any()
    assert cache.pool[2].all()


def test_layers_that_are_alike_lie_as_before() -> None:
    spec = from_json(json.dumps(PLAIN), "spec")
    layout = BlockLayout.of(spec, HeadSplit.of(6, 3, 1, 0), 16, torch.float32)
    assert [layout.places[i].start for i in range(4)] == [2 * 16 * 3 * 4 * i for i in range(4)]


@pytest.mark.parametrize(
    ("architecture", "per_token"),
    [
        # Five of 30 layers attend to everything, with heads of 512.
        ("Gemma4ForCausalLM", 2 * 4 * (25 * 256 + 5 * 512)),
        ("Gemma3nForCausalLM", 2 * 2 * 256 * 20),  # 15 of 35 layers have keys and values of others
        ("DeepseekV32ForCausalLM", 61 * (512 + 64 + 128)),
        ("GlmMoeDsaForCausalLM", 78 * (512 + 64 + 128)),
    ],
)
def test_the_pool_takes_what_published_sizes_need(architecture: str, per_token: int) -> None:
    spec = spec_of({"architectures": [architecture]})
    whole = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    assert KVCache.bytes_per_block(spec, whole, 16, torch.bfloat16) == 16 * per_token * 2


def test_keys_of_indexers_lie_beside_latents_of_layers_that_choose(tmp_path: Path) -> None:
    sharing = ["full", "shared", "shared", "full"]
    given = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4, "indexer_types": sharing}
    spec = spec_of(given)
    cache = KVCache(spec, HeadSplit.of(64, 1, 1, 0), 3, 16, torch.float32, CPU)
    assert cache.index_keys.keys() == {0, 3}
    assert cache.index_keys[3].shape == (3, 16, 1, 128)
    assert cache.pool.shape == (3, 16 * (4 * 576 + 2 * 128))
    assert [spec.choice_source(i) for i in range(4)] == [0, 0, 0, 3]


def test_a_model_of_states_alone_has_blocks_of_one_element() -> None:
    alone = {"mamba": {"channels": 8, "state_dim": 2, "conv_width": 2, "step_rank": 2}, "has_mlp": False}
    names = {f"state_{name}": "n" for name in ("in", "select", "step", "decay", "skip", "conv", "out")}
    spec = from_json(json.dumps(PLAIN | alone | {"state_layers": [0, 1, 2, 3], "names": names}), "spec")
    cache = KVCache(spec, HeadSplit.of(6, 3, 1, 0), 5, 16, torch.float32, CPU)
    assert (cache.num_bytes, cache.keys, cache.values) == (5 * 4, {}, {})
    cache.wipe([1])
