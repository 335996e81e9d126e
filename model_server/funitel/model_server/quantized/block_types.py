"""Types of blocks that are computed on as they are: GGUF's, and those of `block_formats`. No torch here."""

from enum import Enum


class BlockType(Enum):
    """Types by their names in GGUF, or of layouts in `block_formats`.

    The values: the name, inputs and bytes of a block, where its 16-bit scales lie. Source of GGUF's:
    `GGML_QUANT_SIZES` of the gguf library, the structs of ggml's `ggml-common.h`.
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
    Q8_B32T1 = ("Q8_B32T1", 32, 36, (0, 2))
    Q6_B64T1 = ("Q6_B64T1", 64, 52, (0, 2))
    Q5_B64T1 = ("Q5_B64T1", 64, 44, (0, 2))
    Q4_B32T1 = ("Q4_B32T1", 32, 20, (0, 2))
    Q4_B64T1 = ("Q4_B64T1", 64, 36, (0, 2))
    Q3H_B64T1 = ("Q3H_B64T1", 64, 32, (0, 2))
    Q3_B32T1 = ("Q3_B32T1", 32, 16, (0, 2))
    Q2_B32T1 = ("Q2_B32T1", 32, 12, (0, 2))
    A16W8_G32 = ("A16W8_G32", 32, 36, (0, 2))
    A16W8_G64 = ("A16W8_G64", 64, 68, (0, 2))
    A16W8_G128 = ("A16W8_G128", 128, 132, (0, 2))
    A16W8_G256 = ("A16W8_G256", 256, 260, (0, 2))
    A16W4_G32 = ("A16W4_G32", 32, 20, (0, 2))
    A16W4_G64 = ("A16W4_G64", 64, 36, (0, 2))
    A16W4_G128 = ("A16W4_G128", 128, 68, (0, 2))
    A16W4_G256 = ("A16W4_G256", 256, 132, (0, 2))

    def __init__(self, _name: str, num_inputs: int, num_bytes: int, scales: tuple[int, ...]) -> None:
        self.num_inputs, self.num_bytes, self.scales = num_inputs, num_bytes, scales

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF may have it."""
        return "_B" not in self.name and not self.name.startswith("A16")

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of one output."""
        return -(-num_inputs // self.num_inputs) * self.num_bytes

    def cuts(self, columns: tuple[int, int] | None) -> bool:
        """Whether a range of inputs begins or ends within a block."""
        return columns is not None and any(column % self.num_inputs for column in columns)
