"""Types of GGUF blocks: sizes are those of the gguf library, and a kind exists only for what the engine has."""

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from funitel.model_server.cpu.footprint import output_bytes
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.quantized.block_types import BlockType


@pytest.mark.parametrize("block", [each for each in BlockType if each.is_gguf])
def test_blocks_have_the_sizes_of_the_format(block: BlockType) -> None:
    assert (block.num_inputs, block.num_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[block.name]]
    assert block.row_bytes(512) == 512 // block.num_inputs * block.num_bytes


def test_types_of_the_same_sizes_are_different_types() -> None:
    assert BlockType["IQ4_NL"] is not BlockType["Q4_0"]
    assert len(set(BlockType)) == len(BlockType.__members__) == 31
    assert len([each for each in BlockType if each.is_gguf]) == 15


@pytest.mark.parametrize(
    ("kind", "columns", "is_cut"),
    [
        ("Q4_0", (32, 96), False),
        ("Q4_0", (32, 100), True),
        ("Q4_K", (0, 512), False),
        ("Q4_K", (32, 512), True),
        ("F16", (1, 3), False),
        ("Q6_K", None, False),
    ],
)
def test_a_block_is_cut_by_a_range_that_ends_within_it(
    kind: str, columns: tuple[int, int] | None, is_cut: bool
) -> None:
    assert BlockType[kind].cuts(columns) is is_cut


def test_a_type_has_the_kind_of_its_name_and_a_number_of_16_bits_that_of_its_size() -> None:
    assert MatrixKind.of_blocks(BlockType.Q4_1) is MatrixKind.Q4_1
    assert MatrixKind.of_blocks(BlockType.F16) is MatrixKind.FLOAT16
    assert MatrixKind.of_blocks(None) is None
    assert output_bytes(MatrixKind.Q8_0, 64) == 68


def test_every_kind_of_blocks_is_a_type_of_the_format() -> None:
    assert {kind.name for kind in MatrixKind if kind.has_blocks} <= set(BlockType.__members__)
