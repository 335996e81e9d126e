"""Recorded steps with adapters: the logits of the same steps computed as they are, whichever adapters a replay has.

Kernels run in Triton's interpreter. Without a GPU a replay is the recorded work done again on the same fixed tensors;
`Launches` checks that it launches the kernels of adapters with the arguments that were recorded, as a graph does.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.adapters.registry import LoadedAdapters, PlacedAdapter
from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.attention.triton_kernels import TritonAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.low_rank import kernels
from funitel.model_server.layers.low_rank.kernels import TritonLowRankOps
from funitel.model_server.layers.low_rank.ops import TorchLowRankOps
from funitel.model_server.layers.low_rank.recorded import RecordedLowRank
from funitel.model_server.layers.low_rank.weights import weights_of
from funitel.model_server.models.adapters import take_adapters
from funitel.model_server.models.cuda_graphs import Body, GraphedDecoder
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, TinyAdapter, save_adapter

CPU = torch.device("cpu")
DTYPE = torch.float64  # weights of float32 are packed for oneDNN on a CPU, which kernels do not read
BLOCK, CONTEXT, BUCKETS = 4, 60, (1, 2, 4, 8)
TOLERANCE = 1e-4
QV = TinyAdapter(rank=4, targets=("q_proj", "v_proj"))
MLP = TinyAdapter(rank=3, targets=("gate_proj", "up_proj", "down_proj"))
ALL = TinyAdapter(rank=2, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
WIDE = TinyAdapter(rank=40, targets=("q_proj", "k_proj", "v_proj", "down_proj"))
HEAD = TinyAdapter(rank=5, targets=("q_proj", "lm_head"))
TABLES = EIGHT[5]  # of the embedding, which kernels do not compute
Launch = tuple[int, ...]


class Launches:
    """Records, whose replays must launch the kernels of adapters as it was recorded: same sizes, same addresses."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0
        self._now: list[Launch] = []

    def note(self, *args: Any) -> None:
        x, y, layout, records, size = args
        tensors = layout.rows, layout.tiles, records
        sizes = size.num_ranks, size.num_pieces, size.num_outputs, layout.num_programs, len(x), y.shape[1]
        self._now.append((*(each.data_ptr() for each in tensors), *sizes))

    def __call__(self, body: Body) -> Body:
        self.num_recorded += 1
        self._now.clear()
        body()
        recorded = list(self._now)

        def replay() -> torch.Tensor | None:
            self.num_replays += 1
            self._now.clear()
            result = body()
            assert self._now == recorded
            self.num_launches = len(recorded)
            return result

        return replay


@dataclass
class Model:
    """A decoder with Triton kernels and its recorded steps; and the same decoder in torch alone."""

    folder: Path
    decoder: Decoder
    graphed: GraphedDecoder
    reference: Decoder
    registry: LoadedAdapters
    launches: Launches
    caches: list[KVCache]
    num_saved: int = 0

    def load(self, name: str, made: TinyAdapter, seed: int = 0) -> PlacedAdapter:
        self.num_saved += 1
        folder = save_adapter(self.folder, self.folder.parent / f"{name}-{self.num_saved}", made, seed)
        return self.registry.load(name, str(folder), lambda _: False)

    def check(self, adapters: Sequence[PlacedAdapter | None], *, is_recorded: bool = True) -> None:
        """A step of rows with these adapters has the logits of torch."""
        rows = [
            RowSpan([7 + 13 * i], 3 + (5 * i) % 4, np.array([1 + 2 * i, 2 + 2 * i], np.int32), adapter=adapter)
            for i, adapter in enumerate(adapters)
        ]
        before = self.launches.num_replays
        expected, found = self.step(self.reference, 0, rows), self.step(self.graphed, 1, rows)
        assert self.launches.num_replays - before == is_recorded
        assert torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        theirs, ours = [cache.pool[1:] for cache in self.caches]
        assert torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)

    @torch.inference_mode()
    def step(self, forward: Forward, cache: int, rows: Sequence[RowSpan]) -> torch.Tensor:
        logits = forward(ForwardBatch.build(rows, BLOCK, CPU), self.caches[cache])
        assert logits is not None
        return logits


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    folder = save_tiny("llama", tmp_path / "base")
    spec = spec_of(read_json(folder / "config.json"))
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    attention = TritonAttention(BLOCK, CPU, **heads, dtype=DTYPE, num_processors=16)
    launches, launch = Launches(), kernels._add

    def add(*args: Any) -> None:
        launches.note(*args)
        launch(*args)

    monkeypatch.setattr(kernels, "_add", add)

    def decoder(ops: TorchLowRankOps, attention: AttentionBackend) -> Decoder:
        weights = Weights(folder, DTYPE, CPU, spec.names.prefix)
        made = Decoder(spec, weights, TensorParallel(), attention)
        bases.append(take_adapters(made, weights.prefix, DTYPE, CPU))
        assert made.low_rank is not None
        made.low_rank.ops = ops
        return made

    bases: list[Any] = []
    fast = decoder(TritonLowRankOps(), attention)
    reference = decoder(TorchLowRankOps(), TorchAttention(BLOCK, CPU))
    split = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
    caches = [KVCache(spec, split, 40, BLOCK, DTYPE, CPU) for _ in range(2)]
    graphed = GraphedDecoder(fast, attention, BUCKETS, CONTEXT, launches)
    return Model(folder, fast, graphed, reference, LoadedAdapters(bases[0], 64), launches, caches)


def test_each_replay_has_the_adapters_of_its_own_rows(model: Model) -> None:
    a, b, c = (model.load(name, made, i) for i, (name, made) in enumerate([("a", QV), ("b", MLP), ("c", ALL)]))
    steps: list[list[PlacedAdapter | None]] = [
        [c, b, a],  # with padding
        [a, a, a, a],
        [b, None, a, None],  # rows without adapters between
        [None, c, c, b],
        [None, None, None, a],
    ]
    for adapters in steps:
        model.check(adapters)
    assert model.launches.num_recorded == 1
    model.check([a])
    model.check([b])
    assert model.launches.num_recorded == 2


def test_steps_without_adapters_launch_no_kernels_of_them(model: Model) -> None:
    a = model.load("a", ALL)
    model.check([None, None])
    assert model.launches.num_launches == 0
    model.check([a, None])
    assert model.launches.num_launches > 0
    model.check([None, None])
    assert model.launches.num_launches == 0
    assert model.launches.num_recorded == 2


def test_as_many_adapters_as_rows(model: Model) -> None:
    adapters = [model.load(f"a{i}", QV if i % 2 else ALL, i) for i in range(12)]
    model.check(adapters[:1] * 8)
    model.check(adapters[:8])
    model.check(adapters[4:])  # more than the table has slots for: some take the place of others
    model.check([*adapters[:4], *adapters[8:]])
    assert model.launches.num_recorded == 1


def test_a_larger_adapter_that_joins_later_has_the_steps_recorded_anew(model: Model) -> None:
    a = model.load("a", QV)
    model.check([a, None])
    model.check([None, None])
    narrow = model.launches.num_launches
    b = model.load("b", WIDE, 1)
    model.check([a, b])
    model.check([b, a])
    model.check([None, None])
    assert model.launches.num_recorded == 3
    assert narrow == 0
    assert len(model.graphed._steps) == 2  # the narrow one is gone
    c, d = model.load("c", MLP, 2), model.load("d", QV, 3)
    model.check([b, a])  # loading alone changes nothing: ranks may load between different steps
    assert model.launches.num_recorded == 3
    model.check([c, a])  # other sites
    assert model.launches.num_recorded == 4
    model.check([d, c])  # no larger
    assert model.launches.num_recorded == 4


def test_an_adapter_loaded_again_elsewhere_is_read_there(model: Model) -> None:
    a, other = model.load("a", ALL, 1), model.load("b", ALL, 2)
    model.check([a, other])
    weights = weights_of(a)
    sites = list(weights.sites.values())
    model.registry.unload("a")
    for site in sites:  # a replay that still read these would give something else
        assert site.shrink is not None
        site.shrink.weight.fill_(torch.nan)
    del a, weights
    a = model.load("a", ALL, 3)
    model.check([a, other])
    model.check([None, a])
    assert model.launches.num_recorded == 1


def test_an_unloaded_adapter_is_free(model: Model) -> None:
    a = model.load("a", ALL)
    model.check([a, None])
    recorded = model.graphed._adapters
    assert isinstance(recorded, RecordedLowRank)
    assert len(recorded._slots) == 1
    model.registry.unload("a")
    del a
    gc.collect()
    assert len(recorded._slots) == 0


def test_one_piece_two_and_three(model: Model) -> None:
    q = TinyAdapter(rank=3, targets=("q_proj",))
    made = [model.load(name, each, i) for i, (name, each) in enumerate([("q", q), ("qv", QV), ("qkv", ALL)])]
    for adapters in (made, made[::-1], [made[1], made[1], made[0]]):
        model.check(adapters)


def test_adapters_of_the_head(model: Model) -> None:
    a = model.load("a", HEAD)
    model.check([None, a, a])
    model.check([a, None, None])
    assert model.launches.num_recorded == 1


def test_adapters_that_kernels_do_not_compute_have_their_steps_computed_as_they_are(model: Model) -> None:
    a, table = model.load("a", QV), model.load("t", TABLES, 1)
    model.check([a, table], is_recorded=False)
    model.check([a, None])
    model.check([table, None], is_recorded=False)


def test_recordings_of_steps_with_adapters_count_where_there_may_be_some(model: Model) -> None:
    assert model.graphed.num_recordings == 2 * len(BUCKETS)
    assert model.decoder.low_rank is not None
    model.decoder.low_rank.ops = TorchLowRankOps()
    assert model.graphed.num_recordings == len(BUCKETS)
    model.decoder.low_rank = None
    assert model.graphed.num_recordings == len(BUCKETS)


def test_without_kernels_of_adapters_their_steps_are_computed_as_they_are(model: Model) -> None:
    assert model.decoder.low_rank is not None
    model.decoder.low_rank.ops = TorchLowRankOps()
    a = model.load("a", ALL)
    model.check([a, None], is_recorded=False)
    model.check([None, None])


def test_a_new_pool_is_recorded_anew(model: Model) -> None:
    a = model.load("a", ALL)
    model.check([a, None])
    model.graphed.forget_recordings()
    assert model.graphed._adapters is None
    model.check([a, None])
    assert model.launches.num_recorded == 2
