"""Layers with a state: chunks, company and the place of a state change nothing, and a saved state can be continued."""

from pathlib import Path

import numpy as np
import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.tools.quantize.layer_walk import inputs_of
from funitel.proto.errors import UnsupportedModel
from funitel.proto.step import StateSave
from funitel_testing.forward_worker import BLOCK_SIZE, CPU
from funitel_testing.zoo import VOCAB_SIZE, ZOO

KINDS = ["qwen3_next", "granite_hybrid_dense", "lfm2", "kimi_linear", "mamba"]  # one of each kind of layer
LENGTH, NUM_SLOTS = 150, 8
TOLERANCE = 1e-4  # of logits
PROMPT = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
TABLE = np.arange(1, LENGTH // BLOCK_SIZE + 2, dtype=np.int32)


class Served:
    """A checkpoint with a pool; states are filled with numbers that no sequence has left."""

    def __init__(self, name: str, folder: Path) -> None:
        ZOO[name].save(folder)
        spec = choose_spec(None, folder)
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
        self.decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        self.cache = KVCache(spec, heads, 2 * len(TABLE) + 2, BLOCK_SIZE, torch.float32, CPU)
        layout = StateLayout.of(spec, 1, 0)
        assert layout is not None
        self.states = self.cache.state_pool = StatePool(layout, NUM_SLOTS, CPU)
        self.states.pool.fill_(7.0)

    @torch.inference_mode()
    def run(self, *spans: RowSpan) -> torch.Tensor:
        found = self.decoder(ForwardBatch.build(spans, BLOCK_SIZE, CPU), self.cache)
        assert found is not None
        return found


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("model"))


def span(first: int, last: int, slot: int, *saves: StateSave, table: np.ndarray = TABLE) -> RowSpan:
    return RowSpan(PROMPT[first:last], first, table, "all", state_slot=slot, state_saves=saves)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) < TOLERANCE


def test_chunks_change_nothing(served: Served) -> None:
    expected = served.run(span(0, LENGTH, 1))
    state = served.states.pool[1].clone()
    for cuts in ([1, 2, 3], [64], [65, 129], [10, 11, 100, 140, 149]):
        borders = [0, *cuts, LENGTH]
        found = [served.run(span(a, b, 2)) for a, b in zip(borders, borders[1:], strict=False)]
        assert near(torch.cat(found), expected)
        assert float((served.states.pool[2] - state).abs().max()) < 1e-5 * max(1.0, float(state.abs().max()))


@pytest.mark.parametrize("position", [1, 3, 63, 64, 65, 100, LENGTH - 1, LENGTH])
def test_a_state_that_was_saved_is_continued_elsewhere(served: Served, position: int) -> None:
    whole = served.run(span(0, LENGTH, 1, StateSave(position, 3), StateSave(position, 4), StateSave(7, 5)))
    served.states.copy(3, 6)
    assert torch.equal(served.states.pool[3], served.states.pool[4])
    if position < LENGTH:
        served.states.clear([1])
        assert near(served.run(span(position, LENGTH, 6)), whole[position:])
    else:
        assert torch.equal(served.states.pool[1], served.states.pool[6])


def test_the_state_of_a_decoding_row_is_saved(served: Served) -> None:
    expected = served.run(span(0, 42, 1))
    served.run(span(0, 40, 1))
    served.run(span(0, 20, 2, table=TABLE + len(TABLE)))
    saves = StateSave(40, 4), StateSave(41, 3), StateSave(42, 5)  # of which one is reached
    before = served.states.pool[4].clone(), served.states.pool[5].clone()
    served.run(span(40, 41, 1, *saves), span(20, 21, 2, table=TABLE + len(TABLE)))
    assert torch.equal(served.states.pool[4], before[0])
    assert torch.equal(served.states.pool[5], before[1])
    assert torch.equal(served.states.pool[3], served.states.pool[1])
    assert near(served.run(span(41, 42, 3)), expected[41:])


def test_rows_in_one_step_do_not_touch_each_other(served: Served) -> None:
    alone = served.run(span(0, 50, 1))
    other = TABLE + len(TABLE)
    served.run(span(0, 49, 1))
    served.run(span(0, 30, 2, table=other))
    mixed = served.run(span(49, 50, 1), span(30, 60, 2, table=other))
    assert near(mixed[:1], alone[49:])
    served.run(span(0, 49, 1))
    served.run(span(0, 49, 2, table=other))
    both = served.run(span(49, 50, 1), span(49, 50, 2, table=other))
    assert near(both, alone[49:].expand(2, -1))


def test_what_cannot_be_quantised_is_one_line(served: Served) -> None:
    with pytest.raises(
        UnsupportedModel, match="has (layers with a state|a mixture of experts): it cannot be quantised"
    ):
        inputs_of(served.decoder.spec, "model.", 0)


def test_slot_0_and_the_slots_of_others_stay(served: Served) -> None:
    served.states.pool.fill_(3.0)
    served.run(span(0, 10, 2))
    changed = (served.states.pool != 3.0).any(dim=1).nonzero().flatten().tolist()
    assert changed == [2]
