"""Types of GGUF tensors that are computed on as they are. No torch here."""

from enum import Enum


class BlockType(Enum):
    """Types by their names in GGUF. The values: the name, inputs and bytes of a block, where its 16-bit scales lie.

    Source: `GGML_QUANT_SIZES` of the gguf library, the structs of ggml's `ggml-common.h`.
    """

    Q4_0 = ("Q4_0", 32, 18, (0,))
    Q4_1 = ("Q4_1", 32, 20, (0, 2))
    Q5_0 = ("Q5_0", 32, 22, (0,))
    Q5_1 = ("Q5_1", 32, 24, (0, 2))
    Q8_0 = ("Q8_0", 32, 34, (0,))
    Q2_K = ("Q2_K", 256, 84, (80, 82))
    Q3_K = ("Q3_K", 256, 110, (108,))
    Q4_K = ("Q4_K", 256, 144, (0, 2))
    Q5_K = ("Q5_K", 256, 176, (0, 2))
    Q6_K = ("Q6_K", 256, 210, (208,))
    IQ4_NL = ("IQ4_NL", 32, 18, (0,))
    IQ4_XS = ("IQ4_XS", 256, 136, (0,))
    MXFP4 = ("MXFP4", 32, 17, ())
    F16 = ("F16", 1, 2, (0,))
    BF16 = ("BF16", 1, 2, (0,))

    def __init__(self, _name: str, num_inputs: int, num_bytes: int, scales: tuple[int, ...]) -> None:
        self.num_inputs, self.num_bytes, self.scales = num_inputs, num_bytes, scales

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of one output."""
        return num_inputs // self.num_inputs * self.num_bytes

    def cuts(self, columns: tuple[int, int] | None) -> bool:
        """Whether a range of inputs begins or ends within a block."""
        return columns is not None and any(column % self.num_inputs for column in columns)
