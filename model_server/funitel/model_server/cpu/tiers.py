"""Precision tiers of the fused step, and which of them the settings ask for. No torch here."""

from enum import Enum

from funitel.model_server.quantization import Quantization
from funitel.proto.errors import SettingsError


class Tier(Enum):
    """How weights are kept, as the C++ side numbers them. Activations are float32, for int8 weights int16 levels."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2

    @property
    def label(self) -> str:
        """The name in flags and logs."""
        return self.name.lower()

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return {Tier.FLOAT32: 4, Tier.FLOAT16: 2, Tier.INT8: 1}[self]

    @property
    def has_half_kv(self) -> bool:
        """Keys and values are float16; float32 only in the exact tier."""
        return self is not Tier.FLOAT32


def choose_tier(dtype: str | None, quantize: str | None, quantization: Quantization | None) -> Tier | None:
    """The tier for a CPU; None leaves the model to torch.

    Where nothing is asked for, floating-point weights become int8, weights that are int8 already stay so, and other
    quantised ones, which int8 would round a second time, become float16.

    Args:
        dtype, quantize: the settings of these names.
        quantization: what the checkpoint says of its own; `quantize` then only confirms it.

    Raises:
        SettingsError: exact weights and int8 weights are both asked for.
    """
    if quantize == "int8" and quantization is None and dtype not in (None, "float16"):
        raise SettingsError(f"--quantize int8 makes int8 of the weights, --dtype {dtype} keeps them: give one")
    if quantize == "int8" and quantization is None:
        return Tier.INT8
    if dtype is None:
        return Tier.INT8 if quantization is None or "int8" in quantization.flags else Tier.FLOAT16
    return {"float32": Tier.FLOAT32, "float16": Tier.FLOAT16}.get(dtype)
