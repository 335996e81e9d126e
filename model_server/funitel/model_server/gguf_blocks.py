"""Types of GGUF's blocks that are computed on as they are, and where a converted model keeps them. No torch here.

`gguf_convert` writes the file, `blocks` reads it: for each matrix of one of the types a tensor of bytes, a row for each
output, under the name of the float32 tensor, with its type in the file's metadata. Outputs are in Hugging Face's order,
whichever way round the float32 tensor lies.
"""

from enum import Enum
from pathlib import Path

BLOCKS = Path("gguf") / "blocks.safetensors"
"""In the folder of a converted model; deeper than the model's own weights, where nobody takes it for more of them."""
BLOCK_INPUTS = 32


class BlockType(Enum):
    """Types by their names in GGUF; the values are bytes for 32 inputs."""

    Q4_0 = 18
    Q4_1 = 20
    Q8_0 = 34

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of one output."""
        return num_inputs // BLOCK_INPUTS * self.value
