"""Blocks as codes: what is read of them is what they stand for, and the Triton kernels multiply by them as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from funitel.model_server.checkpoint.block_storage import BlockStorage, RoundedStorage
from funitel.model_server.checkpoint.storage import Range, open_file
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.block_formats import FORMATS, BlockFormat
from funitel.model_server.quantized.config import BLOCKS, Quantization
from safetensors.torch import save_file

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = pytest.mark.parametrize("name", FORMATS)
NUM_OUTPUTS, NUM_INPUTS = 40, 512


def drawn() -> torch.Tensor:
    """Weights with blocks that are constant, zero, far from zero, and with an outlier."""
    weights = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(4)) / 8
    weights[0, :256], weights[1, :256], weights[2, 256:] = 0.25, 0.0, -3.0
    weights[3] += 2.0
    weights[4, 100] = 6.0
    return weights


def storage_of(folder: Path, chosen: BlockFormat, *, is_made: bool) -> BlockStorage | RoundedStorage:
    """The weights as blocks in a file, or in floating point and made on reading."""
    weights, path = drawn(), folder / "model.safetensors"
    inputs = torch.tensor([NUM_INPUTS], dtype=torch.int32)
    blocks = {"a.weight_blocks": chosen.encode(weights), "a.weight_inputs": inputs}
    save_file({"a.weight": weights} if is_made else blocks, path)
    file, names = open_file(path)
    files = dict.fromkeys(names, file)
    if is_made:
        return RoundedStorage(files, "a.weight", chosen)
    described = Quantization(method=BLOCKS, bits=0, group_size=0, formats=(("", chosen.name),))
    return BlockStorage(files, "a", described)


@EVERY
@pytest.mark.parametrize("is_made", [False, True], ids=["stored", "made"])
@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 40), (0, 512)), ((3, 20), (0, 256)), ((0, 40), (171, 341)), ((7, 8), (500, 512))]
)
def test_a_part_is_that_part_of_the_whole(
    tmp_path: Path, name: str, is_made: bool, rows: Range, columns: Range
) -> None:
    """Bit for bit, wherever cuts fall, as codes and as numbers."""
    chosen = FORMATS[name]
    storage = storage_of(tmp_path, chosen, is_made=is_made)
    whole = chosen.decode(chosen.encode(drawn()), NUM_INPUTS)
    expected = whole[slice(*rows), slice(*columns)]
    assert torch.equal(storage.read_codes(rows, columns).dequantize(torch.float32), expected)
    if not is_made:
        assert torch.equal(storage.read(rows, columns, torch.float32, torch.device("cpu")), expected)
