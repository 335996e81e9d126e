"""Open a checkpoint's tensors: one storage for each that the model may ask for, by how the checkpoint is quantised."""

from funitel.model_server.checkpoint.block_storage import BlockStorage
from funitel.model_server.checkpoint.float_storages import Float4Storage, Float8Storage
from funitel.model_server.checkpoint.integer_storages import AwqStorage, CompressedStorage, GptqStorage, IntegerStorage
from funitel.model_server.checkpoint.marlin_24 import Marlin24Storage
from funitel.model_server.checkpoint.quantized_storage import QuantizedStorage
from funitel.model_server.checkpoint.storage import Files, PlainStorage, Storage
from funitel.model_server.quantized.config import (
    AWQ,
    BLOCKS,
    COMPRESSED,
    FP8,
    GPTQ,
    INT_QUANTIZED,
    MARLIN_24,
    NVFP4,
    Quantization,
)
from funitel.model_server.quantized.published import parse_gptq

_STORAGES: dict[str, type[QuantizedStorage]] = {
    GPTQ: GptqStorage,
    AWQ: AwqStorage,
    BLOCKS: BlockStorage,
    COMPRESSED: CompressedStorage,
    INT_QUANTIZED: IntegerStorage,
    MARLIN_24: Marlin24Storage,
    FP8: Float8Storage,
    NVFP4: Float4Storage,
}
TGI_TENSORS = ("gptq_bits", "gptq_groupsize", "gptq_sym")
"""What TGI's own quantiser stores beside the weights, of which `gptq_tensors` reads the first two."""


def open_storages(files: Files, quantization: Quantization | None) -> dict[str, Storage]:
    """One storage for each tensor of the model, by the name it has, or would have, unquantised.

    Raises:
        WeightsError: the parts of a quantised layer do not fit together.
    """
    storages: dict[str, Storage] = {}
    if quantization is not None:
        kind = _STORAGES[quantization.method]
        stems = [name.rpartition(".")[0] for name in files if _is_part(files, name, kind)]
        storages = {f"{stem}.weight": kind(files, stem, quantization) for stem in stems}
    taken = {name for storage in storages.values() for name in storage.names}
    return storages | {name: PlainStorage(files, name) for name in files if name not in taken}


def _is_part(files: Files, name: str, kind: type[QuantizedStorage]) -> bool:
    """Whether a tensor shows that there is a quantised layer."""
    part = name.rpartition(".")[2]
    if part != "weight" or kind.dtype is None:
        return part in kind.marks
    source = files[name].get_slice(name)
    return source.get_dtype() == kind.dtype and len(source.get_shape()) == 2


def gptq_tensors(files: Files) -> Quantization | None:
    """What TGI's own quantiser stored as tensors beside the weights, when it did.

    Its checkpoints have no configuration; `gptq_sym` changes nothing, for zero points are stored either way.
    """
    if "gptq_bits" not in files or "gptq_groupsize" not in files:
        return None
    bits, group_size = (int(files[name].get_tensor(name)) for name in ("gptq_bits", "gptq_groupsize"))
    return parse_gptq({"bits": bits, "group_size": group_size})
