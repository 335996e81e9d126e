"""Describe how the linear layers of a checkpoint are quantised, and check it against `--quantize`.

`published` reads the description off a checkpoint's configuration. No torch here.
"""

from dataclasses import dataclass

from funitel.model_server.settings.block_names import ALIASES
from funitel.proto.errors import SettingsError

GPTQ, AWQ, COMPRESSED, FP8 = "gptq", "awq", "compressed-tensors", "fp8"
INT_QUANTIZED, MARLIN_24, NVFP4, BLOCKS = "int-quantized", "marlin-24", "nvfp4", "funitel-blocks"
Q4_GROUP = 32
MARLIN = "marlin"
"""A value of `--quantize` that every quantised checkpoint fulfils: it names kernels of TGI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Quantised linear layers: `bits` each weight, one scale for each `group_size` inputs of an output (-1: for all).

    `is_zero_exact`: zero points are stored as they are; else one too small, as GPTQ files do unless they say `gptq_v2`.
    `group_outputs` is how many outputs share the scales of their groups. `is_compressed` says that a `method` other
    than its own packed integers is described, and named, as compressed-tensors does. `formats` are those of blocks: the
    usual one, by the name "", and others by the names of their layers; bits and groups are those of the formats.
    `group_bytes` is what a group has beside its codes.
    """

    method: str
    bits: int
    group_size: int
    is_zero_exact: bool = True
    group_outputs: int = 1
    is_compressed: bool = False
    formats: tuple[tuple[str, str], ...] = ()
    group_bytes: int = 2

    def format_of(self, stem: str) -> str:
        """The format of the blocks of a layer."""
        formats = dict(self.formats)
        return formats.get(stem, formats[""])

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Memory of a matrix kept as it is: codes, and what groups have."""
        num_groups = 1 if self.group_size == -1 else -(-num_inputs // self.group_size)
        return num_outputs * (num_inputs * self.bits // 8 + num_groups * self.group_bytes)

    @property
    def flags(self) -> tuple[str, ...]:
        """The values of `--quantize` that fit, the most telling one first."""
        if self.method == BLOCKS:
            usual = self.format_of("")
            return (usual, *(alias for alias, name in ALIASES.items() if name == usual))
        if self.method == COMPRESSED and (self.bits, self.group_size) == (8, -1):
            return ("int8", COMPRESSED)
        if self.method == COMPRESSED and (self.bits, self.group_size) == (4, Q4_GROUP):
            return ("q4", COMPRESSED)
        return (self.method, COMPRESSED) if self.is_compressed else (self.method,)


def check_flag(asked: str | None, found: Quantization | None) -> None:
    """Refuse a `--quantize` that the checkpoint does not fulfil.

    Raises: `SettingsError`.
    """
    if asked is None or (found is not None and asked in (*found.flags, MARLIN)):
        return
    if asked == MARLIN:
        raise SettingsError(
            "--quantize marlin: it names kernels for weights that are quantised already, as gptq, awq, fp8 or "
            "compressed-tensors; those of this checkpoint are not; --quantize int8 makes them int8 as they are loaded"
        )
    if asked == "gguf":
        raise SettingsError("--quantize gguf: blocks of a GGUF are kept as they are on a CPU only; give --device cpu")
    if found is None:
        raise SettingsError(
            f"--quantize {asked}: the weights of this checkpoint are not quantised; "
            f"funitel-server quantize MODEL_ID OUTPUT_DIR makes a checkpoint that is"
        )
    bits = "" if found.method == BLOCKS else f" ({found.bits} bits)"
    raise SettingsError(
        f"--quantize {asked}: this checkpoint is quantised as {found.flags[0]}{bits}; leave the flag out"
    )
