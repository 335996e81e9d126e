"""Sparse tensors of compressed-tensors: the dense values bit for bit, of any part, and one line for what is damaged."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from funitel.model_server.checkpoint.sparse_tensor import dense_files
from funitel.model_server.checkpoint.storage import TensorFile
from funitel.proto.errors import WeightsError
from funitel_testing.sparse import Tensors, pruned_24, sparse_24, sparse_rows

ENCODERS = {"2:4": sparse_24, "rows": sparse_rows}
ROWS, COLUMNS = 23, 44  # the last byte of a row of the mask is half full
CUTS = [(0, ROWS, 0, COLUMNS), (3, 17, 0, COLUMNS), (0, ROWS, 1, 43), (5, 6, 17, 18), (22, 23, 40, 44), (4, 4, 0, 4)]


def random_24(dtype: torch.dtype) -> torch.Tensor:
    """Some fours with fewer values than two, and one row of zeros."""
    weight = pruned_24(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)))
    weight[2], weight[3, :8], weight[4, 0] = 0.0, 0.0, 0.0
    return (100 * weight).to(dtype)


def opened(folder: Path, *files: Tensors) -> dict[str, TensorFile]:
    found: dict[str, TensorFile] = {}
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"{i}.safetensors")
        file = safe_open(folder / f"{i}.safetensors", framework="pt")
        found |= dict.fromkeys(file.keys(), file)
    return found


def bits(values: torch.Tensor) -> list[object]:
    return [values.shape, values.dtype, values.contiguous().flatten().view(torch.uint8).tolist()]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_every_part_is_that_of_the_dense_tensor(encoder: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dense, other = random_24(dtype), torch.ones(3)
    files = dense_files(opened(tmp_path, ENCODERS[encoder](dense, "a.b") | {"a.norm.weight": other}))
    assert sorted(files) == ["a.b.weight", "a.norm.weight"]
    assert torch.equal(files["a.norm.weight"].get_tensor("a.norm.weight"), other)
    part = files["a.b.weight"].get_slice("a.b.weight")
    assert list(part.get_shape()) == [ROWS, COLUMNS]
    plain = opened(tmp_path, {"plain": dense})["plain"].get_slice("plain")
    assert part.get_dtype() == plain.get_dtype()
    assert bits(files["a.b.weight"].get_tensor("a.b.weight")) == bits(dense)
    for top, bottom, left, right in CUTS:
        assert bits(part[top:bottom, left:right]) == bits(dense[top:bottom, left:right])
    for each in (slice(None), slice(2, 5), (slice(None), slice(7, 9)), (3, slice(2, 6)), slice(0, 9, 2), ...):
        assert bits(part[each]) == bits(dense.view(torch.uint8 if dense.itemsize == 1 else dtype)[each].view(dtype))


def test_parts_of_one_tensor_may_lie_in_several_files(tmp_path: Path) -> None:
    dense = random_24(torch.float16)
    tensors = sparse_24(dense, "x")
    files = dense_files(opened(tmp_path, {"x.bitmask": tensors.pop("x.bitmask")}, tensors))
    assert torch.equal(files["x.weight"].get_tensor("x.weight"), dense)


def test_older_names_and_tensors_of_one_dimension(tmp_path: Path) -> None:
    dense, bias = random_24(torch.float32), torch.tensor([0.0, 1.5, 0.0, 0.0, 2.0, -1.0, 0.0, 0.0, 3.0])
    tensors = sparse_rows(dense, "x.weight") | sparse_rows(bias, "x.bias")
    files = dense_files(opened(tmp_path, tensors))
    assert sorted(files) == ["x.bias", "x.weight"]
    assert torch.equal(files["x.weight"].get_tensor(""), dense)
    assert torch.equal(files["x.bias"].get_tensor(""), bias)
    assert torch.equal(files["x.bias"].get_slice("")[3:9], bias[3:9])


def changed(values: torch.Tensor, place: tuple[int, ...], value: int) -> torch.Tensor:
    values = values.clone()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("encoder", "name", "spoil", "message"),
    [
        ("2:4", "x.bitmask", lambda t: changed(t, (5, 0), 0b0111_0011), "x.bitmask is not 2:4"),
        ("2:4", "x.bitmask", lambda t: changed(t, (5, 0), 0b0001_0011), "x.bitmask is not 2:4"),
        ("2:4", "x.bitmask", lambda t: changed(t, (5, 5), 0b0011_0011), "x.bitmask has bits set beyond the 44 columns"),
        ("2:4", "x.bitmask", lambda t: t[:, 1:], "x.bitmask has shape [23, 5], expected [23, 6]"),
        ("2:4", "x.bitmask", lambda t: t.short(), "x.bitmask is I16, expected U8: eight places a byte"),
        ("2:4", "x.bitmask", lambda t: None, "the checkpoint lacks tensor x.bitmask"),
        ("2:4", "x.compressed", lambda t: t[:, 1:], "x.compressed has shape [23, 21], expected [23, 22]"),
        ("2:4", "x.compressed", lambda t: t.flatten(), "x.compressed has shape [506], expected [23, 22]"),
        ("2:4", "x.compressed", lambda t: None, "the checkpoint lacks tensor x.compressed"),
        ("2:4", "x.shape", lambda t: None, "the checkpoint lacks tensor x.shape"),
        ("2:4", "x.shape", lambda t: t[:1], "x.shape says [23], not the two sizes of a matrix"),
        ("2:4", "x.shape", lambda t: -t, "x.shape says [-23, -44], not the two sizes of a matrix"),
        ("2:4", "x.shape", lambda t: t - 2, "x.shape says [21, 42], but 2:4 needs a multiple of 4 columns"),
        ("2:4", "x.weight", lambda t: torch.ones(ROWS, COLUMNS), "holds tensor x.weight both dense and sparse"),
        ("rows", "x.bitmask", lambda t: changed(t, (5, 0), 0), "x.row_offsets does not fit the bits of x.bitmask"),
        ("rows", "x.bitmask", lambda t: changed(t, (5, 5), 0xFF), "x.bitmask has bits set beyond the 44 columns"),
        ("rows", "x.row_offsets", lambda t: t + 1, "x.row_offsets does not fit the bits of x.bitmask"),
        ("rows", "x.row_offsets", lambda t: t - 999, "x.row_offsets does not fit the bits of x.bitmask"),
        ("rows", "x.row_offsets", lambda t: t[1:], "x.row_offsets has shape [22], expected [23]"),
        ("rows", "x.compressed", lambda t: t[1:], "x.row_offsets does not fit the bits of x.bitmask"),
        ("rows", "x.compressed", lambda t: t[None], "x.compressed has shape [1, "),
        ("rows", "x.shape", lambda t: torch.ones(3), "x.shape says [1, 1, 1], not the two sizes of a matrix"),
    ],
)
def test_what_is_damaged_is_one_line(encoder: str, name: str, spoil: object, message: str, tmp_path: Path) -> None:
    assert callable(spoil)
    tensors = ENCODERS[encoder](random_24(torch.float32), "x")
    spoiled = spoil(tensors.pop(name, torch.zeros(0)))
    if spoiled is not None:
        tensors[name] = spoiled.contiguous()
    with pytest.raises(WeightsError, match=re.escape(message)) as raised:
        dense_files(opened(tmp_path, tensors))["x.weight"].get_tensor("x.weight")
    assert "\n" not in raised.value.message
