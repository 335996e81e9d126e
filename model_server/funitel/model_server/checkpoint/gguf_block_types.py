"""Types of GGUF blocks that are computed on as they are, and the file of a converted model for them. No torch here.

`gguf_convert` writes the file, `blocks` reads it: for each matrix of one of the types a tensor of bytes, a row for each
output, under the name of the float32 tensor, with its type in the file's metadata. Outputs are in Hugging Face's order,
whichever way round the float32 tensor lies.
"""

import json
from enum import Enum
from pathlib import Path

from funitel.model_server.files.integrity import hash_file, read_json
from funitel.proto.errors import WeightsError

BLOCKS = Path("gguf") / "blocks.safetensors"
"""In the folder of a converted model; deeper than the model's own weights, so that it is not taken for more of them."""
RECORD = BLOCKS.with_name("weights.json")
"""What the weights beside it were when the blocks were written; others saved there since make the blocks worthless."""


class BlockType(Enum):
    """Types by their names in GGUF. The values: the name, inputs of a block, bytes of a block.

    Source: `GGML_QUANT_SIZES` of the gguf library, the structs of ggml's `ggml-common.h`.
    """

    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q8_0 = ("Q8_0", 32, 34)
    Q2_K = ("Q2_K", 256, 84)
    Q3_K = ("Q3_K", 256, 110)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)
    IQ4_NL = ("IQ4_NL", 32, 18)
    IQ4_XS = ("IQ4_XS", 256, 136)
    MXFP4 = ("MXFP4", 32, 17)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)

    @property
    def num_inputs(self) -> int:
        """Inputs of a block."""
        return self.value[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return self.value[2]

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of one output."""
        return num_inputs // self.num_inputs * self.num_bytes

    def cuts(self, columns: tuple[int, int] | None) -> bool:
        """Whether a range of inputs begins or ends within a block."""
        return columns is not None and any(column % self.num_inputs for column in columns)


def record_weights(folder: Path, weights: Path) -> None:
    """Note that the blocks in `folder` stand for the values in the file `weights`, which lies there."""
    state = weights.stat()
    record = {
        "file": weights.name,
        "bytes": state.st_size,
        "modified_ns": state.st_mtime_ns,
        "sha256": hash_file(weights),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def why_unusable(folder: Path) -> str | None:
    """Why the blocks of a folder do not stand for its weights; None where they do.

    A file of another time, a copy say, is hashed.
    """
    try:
        record = read_json(folder / RECORD)
        weights = folder / str(record.get("file"))
        state = weights.stat()
        if state.st_size != record.get("bytes"):
            return f"{weights} has other weights than those they stand for"
        if state.st_mtime_ns != record.get("modified_ns") and hash_file(weights) != record.get("sha256"):
            return f"{weights} has other weights than those they stand for"
    except WeightsError as error:
        return error.message
    except OSError as error:
        return f"the weights they stand for are gone: {error}"
    return None
