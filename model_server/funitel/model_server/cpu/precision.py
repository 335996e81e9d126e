"""Define the precision tiers of the fused step, and choose one by the settings. No torch here."""

from enum import Enum, IntEnum

from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.quantized.config import BLOCKS, Quantization
from funitel.model_server.settings.block_names import ALIASES, BLOCK_FORMATS
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import SettingsError


class MatrixKind(IntEnum):
    """How one matrix is kept, as the C++ side numbers it.

    Activations are bfloat16 for bfloat16 and float32 for the other floating-point kinds; for codes they are levels of 8
    or 16 bits, see `levels.h`.
    """

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 9
    Q3_K = 10
    Q4_K = 11
    Q5_K = 12
    Q6_K = 13
    IQ4_NL = 14
    IQ4_XS = 15
    MXFP4 = 16
    Q8_B32T1 = 17
    Q6_B64T1 = 18
    Q5_B64T1 = 19
    Q4_B32T1 = 20
    Q4_B64T1 = 21
    Q3H_B64T1 = 22
    Q3_B32T1 = 23
    Q2_B32T1 = 24
    A16W8_G32 = 25
    A16W8_G64 = 26
    A16W8_G128 = 27
    A16W8_G256 = 28
    A16W4_G32 = 29
    A16W4_G64 = 30
    A16W4_G128 = 31
    A16W4_G256 = 32

    @property
    def has_blocks(self) -> bool:
        """Whether some inputs of an output share a scale."""
        return self >= MatrixKind.Q4_0

    @property
    def has_codes(self) -> bool:
        """Whether weights are codes, and activations are levels for them; the other kinds are floating-point."""
        return self >= MatrixKind.INT8

    @property
    def operand(self) -> str:
        """How activations are laid out for it: matrices of the same operand and inputs can share them."""
        return "levels" if self.has_codes else "pairs" if self is MatrixKind.BFLOAT16 else "floats"

    @classmethod
    def of_blocks(cls, block_type: BlockType | None) -> "MatrixKind | None":
        """The kind that computes on tensors of a GGUF's type as they are; None where there is none."""
        if block_type is None:
            return None
        return cls.__members__.get(_NUMBERS.get(block_type.name, block_type.name))


_NUMBERS = {"F16": "FLOAT16", "BF16": "BFLOAT16"}  # types without scales, by their names here


class ActivationDtype(IntEnum):
    """Levels of activations, with a scale for each 32, where weights are codes; the value is their bytes.

    `INT8` has 16 bits too where one of the 32 is an outlier.
    """

    INT8 = 1
    INT16 = 2

    @property
    def label(self) -> str:
        """The name in flags and logs."""
        return self.name.lower()


class KvKind(IntEnum):
    """How the fused step keeps keys and values, as the C++ side numbers it."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    FP8_E4M3FN = 3
    FP8_E5M2 = 4
    INT8 = 5
    UINT4 = 6

    @property
    def label(self) -> str:
        """The name in flags and logs."""
        return self.name.lower()


MAX_CODES_DIM = 512
"""Elements of the largest head that codes are made of."""
_LATENT_KINDS = (KvKind.FLOAT32, KvKind.FLOAT16)


def asked_kv_kind(spec: ModelSpec, block_size: int, asked: str) -> KvKind:
    """The kind that a `--kv-cache-dtype` asks for.

    Raises:
        SettingsError: the fused step does not have it for this model.
    """
    kind = KvKind.FP8_E4M3FN if asked == "fp8" else KvKind[asked.upper()]
    reason = None
    if spec.latent is not None and kind not in _LATENT_KINDS:
        reason = "the model keeps latents, which have the precisions float32 and float16 on a CPU"
    elif kind is KvKind.BFLOAT16 and (spec.head_dim % 2 or block_size % 2):
        reason = f"pairs need even sizes, heads have {spec.head_dim} elements and blocks {block_size} tokens"
    elif kind >= KvKind.INT8 and spec.head_dim > MAX_CODES_DIM:
        reason = f"heads have {spec.head_dim} elements, codes are made of at most {MAX_CODES_DIM}"
    if reason is not None:
        raise SettingsError(f"--kv-cache-dtype {asked} is not for this model: {reason}")
    return kind


class Tier(Enum):
    """How weights are kept: all in one precision, or as the blocks of the GGUF they come from."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    GGUF = "gguf"

    @property
    def label(self) -> str:
        """The name in flags and logs."""
        return self.value

    @property
    def kind(self) -> MatrixKind:
        """The kind of a matrix that is not kept as blocks."""
        return MatrixKind.INT8 if self is Tier.GGUF else MatrixKind[self.name]

    def takes_blocks(self, block_type: BlockType) -> bool:
        """Whether matrices of a GGUF's type are read as their blocks."""
        kind = MatrixKind.of_blocks(block_type)
        return self is Tier.GGUF and kind is not None and kind.has_blocks

    def kv_kind(self, spec: ModelSpec, block_size: int, activations: ActivationDtype) -> KvKind:
        """How keys and values are kept where no setting says it.

        float32, float16, or bfloat16 where activations are rounded as much. Pairs of bfloat16 need even sizes, and
        latents have kernels for the other two only.
        """
        if self is Tier.FLOAT32:
            return KvKind.FLOAT32
        has_codes = self.kind.has_codes and activations is ActivationDtype.INT8
        is_even = spec.latent is None and spec.head_dim % 2 == block_size % 2 == 0
        return KvKind.BFLOAT16 if (has_codes or self is Tier.BFLOAT16) and is_even else KvKind.FLOAT16


MADE = {"int8": Tier.INT8, "a8w8": Tier.INT8, "gguf": Tier.GGUF} | dict.fromkeys((*ALIASES, *BLOCK_FORMATS), Tier.GGUF)
"""Values of --quantize that say how weights are kept, not how the checkpoint has them."""


def choose_tier(
    dtype: str | None, quantize: str | None, quantization: Quantization | None, *, has_blocks: bool = False
) -> Tier | None:
    """The tier for a CPU; None leaves the model to torch.

    Where nothing is asked for, the blocks of a GGUF stay as they are, other floating-point weights become int8, weights
    that are int8 already stay so, and other quantised ones, which int8 would round a second time, become float16.

    Args:
        dtype, quantize: the settings of these names.
        quantization: what the checkpoint says of its own; `quantize` then only confirms it.
        has_blocks: the model is a GGUF with matrices that can be kept as they are.

    Raises:
        SettingsError: exact weights and quantised weights are both asked for, or blocks where there are none.
    """
    made = MADE.get(quantize or "") if quantization is None else None
    if made is not None and dtype not in (None, "float16"):
        what = "keeps blocks" if made is Tier.GGUF else "makes int8 of the weights"
        raise SettingsError(f"--quantize {quantize} {what}, --dtype {dtype} keeps {dtype}: give one")
    if made is Tier.GGUF and not has_blocks:
        if quantize != "gguf":
            raise SettingsError(f"--quantize {quantize}: no matrix of this model has whole blocks of inputs")
        raise SettingsError(
            "--quantize gguf: this model is no GGUF file, or one without quantised matrices; "
            "give a GGUF file or its name in the catalogue as --model-id"
        )
    if made is not None:
        return made
    if dtype is not None:
        return Tier(dtype)
    if quantization is None or quantization.method == BLOCKS:
        return Tier.GGUF if has_blocks else Tier.INT8
    return Tier.INT8 if "int8" in quantization.flags else Tier.FLOAT16
