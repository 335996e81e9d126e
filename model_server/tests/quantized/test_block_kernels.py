"""Blocks as codes: what is read of them is what they stand for, and the Triton kernels multiply by them as they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from funitel.model_server.checkpoint.block_storage import BlockStorage, RoundedStorage
from funitel.model_server.checkpoint.storage import Range, open_file
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.block_formats import FORMATS, BlockFormat
from funitel.model_server.quantized.config import BLOCKS, Quantization
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.quantized.select import check
from funitel.proto.errors import WeightsError

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


@EVERY
def test_products_are_those_of_the_weights_on_one_rank_and_two(tmp_path: Path, name: str) -> None:
    """Of two ranks one cuts a block; together they have the sum. Many rows take the matrix in floating point."""
    pytest.importorskip("triton")
    from funitel.model_server.quantized.matmul_kernels import TritonProducts, unpack

    storage, products = storage_of(tmp_path, FORMATS[name], is_made=False), TritonProducts(4)
    whole = FORMATS[name].decode(FORMATS[name].encode(drawn()), NUM_INPUTS)
    x = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(5))
    cut = 171
    shares = [(0, NUM_INPUTS)], [(0, cut), (cut, NUM_INPUTS)]
    for ranks in shares:
        total = torch.zeros(5, NUM_OUTPUTS)
        for start, end in ranks:
            product = products.of([storage.read_codes((0, NUM_OUTPUTS), (start, end)).to(DEVICE)], None)
            [matrix] = product.matrices
            assert (unpack(matrix, torch.float32).cpu() - whole[:, start:end].t()).abs().max() < 1e-6
            total += product(x[:, start:end].to(DEVICE)).cpu()
        assert (total - x @ whole.t()).abs().max() < 1e-4


@EVERY
def test_memory_is_as_described(tmp_path: Path, name: str) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized.matmul_kernels import TritonProducts

    storage, products = storage_of(tmp_path, FORMATS[name], is_made=False), TritonProducts(4)
    [matrix] = products.of([storage.read_codes((0, NUM_OUTPUTS), (0, NUM_INPUTS))], None).matrices
    assert matrix.num_bytes == FORMATS[name].kept.num_bytes(NUM_OUTPUTS, NUM_INPUTS)


def test_matrices_of_several_formats_on_one_input_stay_apart(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized.matmul_kernels import TritonProducts

    names = ("q4_b32t1a", "q8_b32t2", "q3_b32t1b", "a16w8_g32", "q8_b32t1")
    parts, weights = [], []
    for name in names:
        codes = storage_of(tmp_path, FORMATS[name], is_made=True).read_codes((0, NUM_OUTPUTS), (0, 64))
        parts.append(codes.to(DEVICE))
        weights.append(codes.dequantize(torch.float32))
    x, bias = torch.randn(2, 64), torch.randn(len(names) * NUM_OUTPUTS)
    found = TritonProducts(4).of(parts, bias.to(DEVICE))(x.to(DEVICE)).cpu()
    assert (found - x @ torch.cat(weights).t() - bias).abs().max() < 1e-4
    alike = TritonProducts(4).of([parts[0], parts[2]], None)
    assert len(alike.matrices) == 1  # both have codes of 4 bits, and bases in float16
    assert (alike(x.to(DEVICE)).cpu() - x @ torch.cat([weights[0], weights[2]]).t()).abs().max() < 1e-4


def test_rows_of_codes_keep_their_bases(tmp_path: Path) -> None:
    codes = storage_of(tmp_path, FORMATS["q5_b64t1"], is_made=True).read_codes((0, NUM_OUTPUTS), (0, NUM_INPUTS))
    assert torch.equal(codes.rows(3, 9).dequantize(torch.float32), codes.dequantize(torch.float32)[3:9])


@pytest.mark.slow
def test_the_kernel_check_has_bases_too() -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized.matmul_kernels import TritonProducts

    class Baseless(TritonProducts):
        """Leaves bases out."""

        def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
            return super().of([replace(part, bases=None) for part in parts], bias)

    check(TritonProducts(132), DEVICE, torch.float16, has_blocks=True)
    with pytest.raises(ValueError, match="a probe of 1 rows with 4 bits and bases is off by"):
        check(Baseless(132), DEVICE, torch.float16, has_blocks=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_has_no_block_is_refused(tmp_path: Path, value: float) -> None:
    weights = drawn()
    weights[5, 7] = value
    save_file({"a.weight": weights}, tmp_path / "model.safetensors")
    file, names = open_file(tmp_path / "model.safetensors")
    storage = RoundedStorage(dict.fromkeys(names, file), "a.weight", FORMATS["q4_b32t1a"])
    with pytest.raises(WeightsError, match=r"tensor a\.weight holds the scale (nan|inf); scales must be finite"):
        storage.read_codes((0, NUM_OUTPUTS), (0, NUM_INPUTS))
