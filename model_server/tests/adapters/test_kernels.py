"""Adapters in Triton kernels: what torch computes, over shapes drawn at random; interpreted without a GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.adapters.peft_folder import AdapterTensors, LowRank
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site
from funitel.model_server.forward.batch import AdapterGroup
from funitel.model_server.layers.low_rank.kernels import TritonLowRankOps, check_low_rank
from funitel.model_server.layers.low_rank.ops import TorchLowRankOps, place

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
        groups.append(AdapterGroup(PlacedAdapter(str(i), "", 40, weights), rows, rows))
    x, y = drawn(num_rows, num_inputs).to(dtype), drawn(num_rows, sum(outputs)).to(dtype)
    results = []
    for ops in (TorchLowRankOps(), TritonLowRankOps()):
        ops.begin(groups)
        results.append(ops.add(1, x, y.clone(), is_head=sites[1].is_head).double())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    assert error <= BOUNDS[dtype]
    alone = order[: num_rows // 5]
    assert torch.equal(results[1][alone], y[alone].double())


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float64)

    site = Site((("m", 70, (0, 70)),), 100)
    weights = place(
        [site], AdapterTensors({"m": LowRank(drawn(12, 100), drawn(70, 12), 2.0)}, {}), torch.float64, DEVICE
    )
    adapter = PlacedAdapter("a", "", 12, weights)
    x, y = drawn(37, 100), drawn(37, 70)
    results = []
    for rows in (torch.arange(37, device=DEVICE), torch.tensor([20], device=DEVICE)):
        ops = TritonLowRankOps()
        ops.begin([AdapterGroup(adapter, rows, rows)])
        results.append(ops.add(0, x, y.clone(), is_head=False)[20])
    assert torch.equal(*results)


def test_the_probe_passes() -> None:
    check_low_rank(DEVICE, torch.float16)
