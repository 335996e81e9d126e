"""Weights lie side by side, keep their numbers, and find a place however many there are."""

import ctypes

import pytest
import torch

from funitel.model_server.cpu.huge_pages import HUGE_BYTES, LINE_BYTES, HugePages


def numbers_at(address: int, like: torch.Tensor) -> torch.Tensor:
    count = like.numel() * like.element_size()
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=like.dtype).view(like.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reserved", [1, 4096, HUGE_BYTES, 3 * HUGE_BYTES + 17])
def test_tensors_keep_their_numbers(dtype: torch.dtype, reserved: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5), (700, 600), (1, 1), (64, 8))]
    tensors.append(tensors[1].t())  # in the order of its rows, not of its memory
    pages = HugePages(reserved)
    addresses = [pages.place(tensor) for tensor in tensors]
    assert all(address % LINE_BYTES == 0 for address in addresses)
    assert all(map(torch.equal, tensors, map(numbers_at, addresses, tensors)))


def test_small_tensors_are_neighbours() -> None:
    pages = HugePages(4096)
    first, second = (pages.place(torch.zeros(3)) for _ in range(2))
    assert second == first + LINE_BYTES
    assert first % HUGE_BYTES == 0


def test_an_empty_tensor_has_a_place() -> None:
    assert HugePages(0).place(torch.zeros(0, 4)) > 0
