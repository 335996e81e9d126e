"""Tensors read from a mapped GGUF: the values of the gguf library for every type and range, and damage in one line."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile, dequantise, has_nan_scale
from funitel.model_server.files.gguf_pointer import (
    GROUPED,
    HALVES,
    POINTER,
    GgufEntry,
    GgufPointer,
    check_pointer,
    part_of,
    write_pointer,
)
from funitel.model_server.quantized.block_types import BlockType
from funitel.proto.errors import WeightsError

SIZES = (24, 512)
READABLE = [kind for kind in GGML_QUANT_SIZES if kind.name in BlockType.__members__]


def random_rows(kind: str, num_rows: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Blocks of any bits but those of the scales."""
    block = BlockType[kind]
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, 256, (num_rows, num_inputs // block.num_inputs, block.num_bytes), np.uint8)
    if block is BlockType.MXFP4:
        rows[..., 0] = generator.integers(100, 140, rows.shape[:2])
    for at in block.scales:
        drawn = generator.uniform(0.001, 0.01, rows.shape[:2])
        half = drawn.astype("<f2").view("<u2") if block is not BlockType.BF16 else drawn.astype("<f4").view("<u4") >> 16
        rows[..., at], rows[..., at + 1] = half & 255, half >> 8
    return rows.reshape(num_rows, -1)


def write(folder: Path, rows: np.ndarray, **entry: object) -> GgufTensorFile:
    given = {"name": "blk.0.w", "kind": "F32", "offset": 32, "shape": rows.shape} | entry
    (folder / "x.gguf").write_bytes(b"GGUF".ljust(32) + rows.tobytes())
    pointer = GgufPointer((part_of(folder, folder / "x.gguf", 32),), {str(entry.get("hf", "w")): _entry(given)})
    write_pointer(folder, pointer)
    return GgufTensorFile(folder / POINTER)


def _entry(given: dict[str, object]) -> GgufEntry:
    return GgufEntry(**{key: value for key, value in given.items() if key != "hf"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [each.name for each in BlockType if each.is_gguf])
def test_values_are_those_of_the_library_whatever_is_cut_out(kind: str, tmp_path: Path) -> None:
    rows = random_rows(kind, *SIZES)
    expected = gguf.dequantize(rows, GGMLQuantizationType[kind]) if kind != "F16" else rows.view("<f2")
    expected = torch.from_numpy(np.array(expected, np.float32))
    file = write(tmp_path, rows, kind=kind, shape=SIZES)
    tensor = file.get_slice("w")
    assert (tensor.get_shape(), tensor.get_dtype()) == ([24, 512], kind if kind in ("F16", "BF16") else "F32")
    assert torch.equal(file.get_tensor("w").float(), expected)
    for first, last, start, end in ((0, 24, 0, 512), (3, 7, 0, 256), (5, 6, 100, 301), (0, 24, 511, 512)):
        assert torch.equal(tensor[first:last, start:end].float(), expected[first:last, start:end])
    block = BlockType[kind]
    assert torch.equal(
        file.read_blocks("w", SIZES, (3, 7), (256, 512)), torch.from_numpy(rows)[3:7, block.row_bytes(256) :]
    )
    with pytest.raises(WeightsError, match=r"x.gguf: tensor blk.0.w has shape \[24, 512\], expected \[24, 256\]"):
        file.read_blocks("w", (24, 256))


def test_work_in_parts_gives_the_same_values() -> None:
    rows = np.tile(random_rows("Q4_0", 64, 2048), (20, 1))
    np.testing.assert_array_equal(dequantise("Q4_0", rows), gguf.dequantize(rows, GGMLQuantizationType.Q4_0))


def test_blocks_in_the_files_order_are_not_copied(tmp_path: Path) -> None:
    file = write(tmp_path, random_rows("Q4_0", *SIZES), kind="Q4_0", shape=SIZES)
    whole, part = file.read_blocks("w", SIZES), file.read_blocks("w", SIZES, (2, 4), (64, 128))
    assert part.data_ptr() == whole.data_ptr() + 2 * whole.stride(0) + 36


@pytest.mark.parametrize("kind", ["Q8_0", "F32", "BF16"])
@pytest.mark.parametrize(("order", "num_heads"), [(HALVES, 6), (GROUPED, 2)])
def test_rows_come_in_the_checkpoints_order(kind: str, order: str, num_heads: int, tmp_path: Path) -> None:
    rows = (
        np.random.default_rng(1).standard_normal((24, 64), np.float32) if kind == "F32" else random_rows(kind, 24, 64)
    )
    plain = write(tmp_path, rows, kind=kind, shape=(24, 64)).get_tensor("w")
    if order == HALVES:  # heads of 4: rows 0 and 2 are one pair, as the file has 0 and 1
        expected = plain.view(6, 2, 2, 64).transpose(1, 2).reshape(24, 64)
    else:  # heads of 4, and one query head for each of two heads of keys, as the last 16 rows say
        queries, keys, values = plain.split([8, 8, 8])
        each = zip(queries.split(4), keys.split(4), values.split(4), strict=True)
        expected = torch.cat([torch.cat(three) for three in each])
    file = write(tmp_path, rows, kind=kind, shape=(24, 64), order=order, num_heads=num_heads, head_dim=4)
    assert torch.equal(file.get_tensor("w"), expected)
    assert torch.equal(file.get_slice("w")[5:9, 3:40], expected[5:9, 3:40])
    if kind == "Q8_0":
        found = file.read_blocks("w", (24, 64), (5, 9), (32, 64)).numpy()
        values = torch.from_numpy(gguf.dequantize(np.ascontiguousarray(found), GGMLQuantizationType.Q8_0))
        assert torch.equal(values, expected[5:9, 32:])


def test_biases_are_put_in_order_and_norms_lose_their_offset(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    file = write(tmp_path, values, order=HALVES, num_heads=2)
    assert file.get_tensor("w").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert file.get_slice("w")[1:3].tolist() == [2, 1]
    assert write(tmp_path, values, minus=1.0).get_tensor("w").tolist() == (values - 1).tolist()


def test_what_the_checkpoint_turns_is_read_turned(tmp_path: Path) -> None:
    rows = random_rows("Q4_1", 24, 64)
    expected = torch.from_numpy(gguf.dequantize(rows, GGMLQuantizationType.Q4_1)).t()
    file = write(tmp_path, rows, kind="Q4_1", shape=(24, 64), is_turned=True)
    assert file.get_slice("w").get_shape() == [64, 24]
    assert torch.equal(file.get_slice("w")[10:50, 3:7], expected[10:50, 3:7])
    assert torch.equal(file.read_blocks("w", (24, 64), (1, 2)), torch.from_numpy(rows[1:2]))


def test_a_stack_is_a_matrix_for_each_expert(tmp_path: Path) -> None:
    rows = random_rows("Q6_K", 3 * 4, 256)
    file = write(tmp_path, rows, hf="mlp.experts.{j}.up.weight", kind="Q6_K", shape=(3, 4, 256))
    assert file.keys() == [f"mlp.experts.{j}.up.weight" for j in range(3)]
    assert file.type_of("mlp.experts.2.up.weight") is BlockType.Q6_K
    assert torch.equal(file.read_blocks("mlp.experts.2.up.weight", (4, 256)), torch.from_numpy(rows[8:]))


# Damage


@pytest.mark.parametrize("kind", [each.name for each in BlockType if each.is_gguf and each.name != "MXFP4"])
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFFF, 0x7F80])
def test_a_scale_that_is_no_number_is_found(kind: str, bits: int, tmp_path: Path) -> None:
    block, rows = BlockType[kind], random_rows(kind, *SIZES)
    assert not has_nan_scale(block, rows)
    at = block.num_bytes * (512 // block.num_inputs - 1) + block.scales[-1]
    rows[5, at], rows[5, at + 1] = bits & 255, bits >> 8
    file = write(tmp_path, rows, kind=kind, shape=SIZES)
    with pytest.raises(WeightsError, match=r"x.gguf is damaged: tensor blk.0.w holds values that are not numbers$"):
        file.read_blocks("w", SIZES)
    assert file.read_blocks("w", SIZES, (6, 24)).shape[0] == 18


def test_values_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    values = np.full((4, 8), np.nan, np.float32)
    with pytest.raises(WeightsError, match="x.gguf is damaged: tensor blk.0.w holds values that are not numbers"):
        write(tmp_path, values).get_tensor("w")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda path: path.unlink(), r"x.gguf is gone, of which .* was made: name the GGUF as --model-id$"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"was made of it \(it has 799 bytes, it had 800\): name",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[::-1]),
            r"was changed since .* \(its bytes are others\): name",
        ),
    ],
)
def test_a_file_that_is_not_what_it_was_is_refused(change: object, line: str, tmp_path: Path) -> None:
    write(tmp_path, np.arange(192, dtype=np.float32))
    change(tmp_path / "x.gguf")  # type: ignore[operator]
    with pytest.raises(WeightsError, match=line) as caught:
        check_pointer(tmp_path / POINTER)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b""), lambda path: path.touch()])
def test_a_file_that_changes_while_it_is_read_is_refused(change: object, tmp_path: Path) -> None:
    """And not read beyond its end, which would end the process by a signal."""
    file = write(tmp_path, np.arange(200000, dtype=np.float32))
    change(tmp_path / "x.gguf")  # type: ignore[operator]
    with pytest.raises(WeightsError, match=r"x.gguf was changed while it was being read$"):
        file.get_tensor("w")


def test_a_file_replaced_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path, np.arange(2000, dtype=np.float32))
    (tmp_path / "other").write_bytes(bytes(10))
    (tmp_path / "other").rename(tmp_path / "x.gguf")
    assert file.get_tensor("w").tolist() == list(range(2000))


def test_a_tensor_beyond_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tensor blk.0.w reaches byte 1632, the file has 832$"):
        write(tmp_path, np.arange(200, dtype=np.float32), shape=(400,))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"parts": [], "tensors": {"w": {"name": "w", "kind": "F32", "shape": [1], "offset": 0}}}'],
)
def test_a_pointer_that_is_none_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / POINTER).write_text(content)
    with pytest.raises(WeightsError, match=r"model.gguf.json is no pointer to a GGUF \(.*\): delete .*") as caught:
        GgufTensorFile(tmp_path / POINTER)
    assert "\n" not in caught.value.message
