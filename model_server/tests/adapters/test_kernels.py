"""Adapters in Triton kernels: what torch computes, over shapes drawn at random; interpreted without a GPU."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.adapters.peft_folder import AdapterTensors, LowRank
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site
from funitel.model_server.forward.batch import AdapterGroup, RowSpan
from funitel.model_server.layers.low_rank.kernels import TritonLowRankOps, check_low_rank
from funitel.model_server.layers.low_rank.ops import TorchLowRankOps
from funitel.model_server.layers.low_rank.recorded import RecordedLowRank
from funitel.model_server.layers.low_rank.weights import place

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.float64: 1e-5, torch.float16: 2e-3}  # float32 is repacked for oneDNN on a CPU


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("seed", range(12))
def test_kernels_give_what_torch_gives(seed: int, dtype: torch.dtype) -> None:
    chosen = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    num_inputs = chosen.randint(1, 150)
    outputs = [chosen.randint(1, 140) for _ in range(chosen.randint(1, 3))]
    parts = tuple((f"m{i}", size + 5, (2, size + 2)) for i, size in enumerate(outputs))
    sites = [Site((("other", 7, (0, 7)),), 3), Site(parts, num_inputs, is_head=seed % 2 == 1)]
    num_rows, owners = chosen.randint(1, 60), chosen.randint(1, 4)
    order = torch.randperm(num_rows, generator=generator).to(DEVICE)
    groups = []
    for i, rows in enumerate(order[num_rows // 5 :].chunk(owners)):  # the first fifth has no adapter
        low_ranks = {
            f"m{j}": LowRank(drawn(rank, num_inputs), drawn(size + 5, rank), 0.5)
            for j, size in enumerate(outputs)
            if (rank := chosen.choice((0, 1, 8, 16, 40)))
        }
        if not low_ranks:
            low_ranks = {"other": LowRank(drawn(2, 3), drawn(7, 2), 1.0)}
        weights = place(sites, AdapterTensors(low_ranks, {}), dtype, DEVICE)
        places = rows.tolist()
        groups.append(AdapterGroup(PlacedAdapter(str(i), "", 40, weights), places, places, DEVICE))
    x, y = drawn(num_rows, num_inputs).to(dtype), drawn(num_rows, sum(outputs)).to(dtype)
    results = []
    for ops in (TorchLowRankOps(), TritonLowRankOps()):
        ops.begin(groups)
        results.append(ops.add(1, x, y.clone(), is_head=sites[1].is_head).double())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    assert error <= BOUNDS[dtype]
    alone = order[: num_rows // 5]
    assert torch.equal(results[1][alone], y[alone].double())


@pytest.mark.parametrize(
    ("num_rows", "num_inputs"),
    [(37, 100), (37, 1300), (540, 1300)],  # inputs in one part; in three, side by side; in three, one after the other
)
def test_a_row_has_the_same_bits_alone_and_in_company(num_rows: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float64)

    site = Site((("m", 70, (0, 70)),), num_inputs)
    low_rank = LowRank(drawn(12, num_inputs), drawn(70, 12), 2.0)
    weights = place([site], AdapterTensors({"m": low_rank}, {}), torch.float64, DEVICE)
    adapter = PlacedAdapter("a", "", 12, weights)
    x, y = drawn(num_rows, num_inputs), drawn(num_rows, 70)
    results = []
    for rows in (range(num_rows), [20]):
        ops = TritonLowRankOps()
        ops.begin([AdapterGroup(adapter, rows, rows, DEVICE)])
        results.append(ops.add(0, x, y.clone(), is_head=False)[20])
    recorded, numbers = ops.recorded([site], 4, DEVICE), np.zeros(RecordedLowRank.num_numbers(2), np.int32)
    row = RowSpan([0], 0, np.zeros(1, np.int32))
    assert recorded.admit([row, replace(row, adapter=adapter)])
    recorded.fill(numbers, [row, replace(row, adapter=adapter)], 2)
    recorded.take_over(torch.from_numpy(numbers).to(DEVICE))
    results.append(recorded.add(0, x[19:21].clone(), y[19:21].clone(), is_head=False)[1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_logits_of_float32_are_not_rounded_to_the_precision_of_weights() -> None:
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    site = Site((("m", 70, (0, 70)),), 100, is_head=True)
    low_rank = LowRank(drawn(12, 100).half(), drawn(70, 12).half(), 1.0)
    weights = place([site], AdapterTensors({"m": low_rank}, {}), torch.float16, DEVICE)
    x, y = drawn(5, 100).half(), 100 * drawn(5, 70)
    ops = TritonLowRankOps()
    ops.begin([AdapterGroup(PlacedAdapter("a", "", 12, weights), [1, 3], [1, 3], DEVICE)])
    found = ops.add(0, x, y.clone(), is_head=True)
    expected = y.clone()
    expected[[1, 3]] += x[[1, 3]].float() @ low_rank.a.float().t() @ low_rank.b.float().t()
    assert found.dtype is torch.float32
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_the_probe_passes() -> None:
    check_low_rank(DEVICE, torch.float16)
