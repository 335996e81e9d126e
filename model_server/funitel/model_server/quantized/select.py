"""Select the quantised matmul of a device: kernels that read the weights as they are, where a kernel check passes."""

import logging
from dataclasses import replace

import torch

from funitel.model_server.device.probe_or_fall_back import check_probe, probe_or_fall_back, reason_of
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.config import BLOCKS, Quantization
from funitel.model_server.quantized.matmul import FLOAT8, INT8, QuantizedMatmul, round_float8
from funitel.model_server.settings.block_names import ALIASES, BLOCK_FORMATS
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

MADE = {"int8": INT8, "a8w8": INT8, "fp8": FLOAT8} | dict.fromkeys((*ALIASES, *BLOCK_FORMATS))
"""Values of --quantize that say what weights in floating point become on a GPU; None: blocks, as they are read."""
_PROBE_ROWS = (1, 40, 300)  # of the forms that products have


def choose_products(
    quantize: str | None, quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> QuantizedMatmul | None:
    """What multiplies by quantised weights; None where they become floating point when they are loaded.

    Args:
        quantize: the setting.
        quantization: what the checkpoint says of its own; `quantize` then only confirms it.
        device, dtype: of activations.

    Raises:
        SettingsError: `quantize` asks for weights that nothing here multiplies by.
    """
    is_made = quantization is None and quantize in MADE
    made = MADE[quantize] if is_made and quantize is not None else None
    if device.type != "cuda" or (quantization is None and not is_made):
        return None
    has_blocks = made is None if quantization is None else quantization.method == BLOCKS

    def probe() -> QuantizedMatmul:
        # Triton: seconds to import, and there with torch's builds for GPUs only
        from funitel.model_server.quantized.matmul_kernels import TritonProducts

        products = TritonProducts(torch.cuda.get_device_properties(device).multi_processor_count, made)
        check(products, device, dtype, has_blocks=has_blocks)
        logger.info("weights stay quantised; Triton kernels multiply by them")
        return products

    def fall_back(error: Exception) -> None:
        if is_made:
            raise SettingsError(f"--quantize {quantize} needs the Triton kernels: {reason_of(error)}") from error
        logger.warning("quantised weights become %s, without the Triton kernels: %s", dtype, reason_of(error))

    return probe_or_fall_back(probe, fall_back)


def check(products: QuantizedMatmul, device: torch.device, dtype: torch.dtype, *, has_blocks: bool = False) -> None:
    """Raise ValueError unless products are those of the dequantised weights, for numbers drawn at random.

    `has_blocks` says that there are groups with bases.
    """
    generator = seeded_generator(0)
    num_outputs, num_inputs, group = 192, 640, 128

    def drawn(top: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, top, shape, generator=generator).to(device, torch.uint8)

    def integers(bits: int) -> Codes:
        return Codes(
            codes=drawn(1 << bits, num_outputs, num_inputs),
            scales=torch.rand(num_outputs, num_inputs // group, generator=generator).to(device, torch.float16),
            zeros=drawn(1 << bits, num_outputs, num_inputs // group),
            groups=torch.arange(num_inputs, device=device) // group,
        )

    def based(codes: Codes) -> Codes:
        drawn_bases = torch.randn(codes.scales.shape, generator=generator).to(device, torch.float16)
        return replace(codes, zeros=torch.zeros_like(codes.zeros), bases=drawn_bases)

    floats = round_float8(torch.randn(num_outputs, num_inputs, generator=generator).to(device))
    halves = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0], device=device)
    small = replace(floats, codes=halves[drawn(9, num_outputs, num_inputs).int()].to(torch.float8_e4m3fn))
    kinds = {"4 bits": integers(4), "8 bits": integers(8), "float8": floats, "float4": small}
    if has_blocks:
        kinds |= {f"{bits} bits and bases": based(integers(bits)) for bits in (4, 8)}
    for kind, codes in kinds.items():
        product, weights = products.of([codes], None), codes.dequantize(torch.float32)
        for num_rows in _PROBE_ROWS:
            x = torch.randn(num_rows, num_inputs, generator=generator).to(device, dtype)
            check_probe(product(x), x.float() @ weights.t(), probe=f"a probe of {num_rows} rows with {kind}")
