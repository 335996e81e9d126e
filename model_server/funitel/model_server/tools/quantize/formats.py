"""Write quantised layers as the tensors and the `quantization_config` that other programs read.

GPTQ as AutoGPTQ writes it; int8 and q4 as `pack-quantized` of compressed-tensors. The way back is `storage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes, pack
from funitel.model_server.quantized.config import COMPRESSED, GPTQ, Q4_GROUP
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize.level_grid import BITS as GPTQ_BITS

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# AutoGPTQ sizes its tensors in words of 32 inputs and outputs.
_GPTQ_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of quantised layer: which sizes it can hold, its tensors, its configuration."""

    settings: QuantizeSettings
    scale_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return {"gptq": GPTQ_BITS, "int8": 8, "q4": 4}[self.settings.rounding]

    def can_hold(self, num_outputs: int, num_inputs: int) -> bool:
        """Whether a layer of this size can be stored."""
        if self.settings.rounding == "gptq":
            return num_inputs % _GPTQ_MULTIPLE == 0 and num_outputs % _GPTQ_MULTIPLE == 0
        return self.settings.rounding == "int8" or num_inputs % Q4_GROUP == 0

    @property
    def needs(self) -> str:
        """What `can_hold` asks, for a message."""
        return f"inputs{' and outputs' if self.settings.rounding == 'gptq' else ''} in multiples of 32"

    def shapes(self, stem: str, num_outputs: int, num_inputs: int) -> Shapes:
        """Types and shapes of a layer's tensors, before they are there."""
        per_word = WORD_BITS // self.bits
        if self.settings.rounding == "gptq":
            size = num_inputs if self.settings.groupsize == -1 else self.settings.groupsize
            num_groups = -(-num_inputs // size)
            return {
                f"{stem}.qweight": (torch.int32, (num_inputs // per_word, num_outputs)),
                f"{stem}.qzeros": (torch.int32, (num_groups, num_outputs // per_word)),
                f"{stem}.scales": (torch.float16, (num_groups, num_outputs)),
                f"{stem}.g_idx": (torch.int32, (num_inputs,)),
            }
        num_groups = num_inputs // Q4_GROUP if self.settings.rounding == "q4" else 1
        return {
            f"{stem}.weight_packed": (torch.int32, (num_outputs, -(-num_inputs // per_word))),
            f"{stem}.weight_scale": (self.scale_dtype, (num_outputs, num_groups)),
            f"{stem}.weight_shape": (torch.int64, (2,)),
        }

    def tensors(self, stem: str, codes: Codes) -> dict[str, torch.Tensor]:
        """A layer's tensors, in the order of `shapes`."""
        if self.settings.rounding == "gptq":
            zeros = (codes.zeros - 1) & (2**self.bits - 1)  # one less: the convention of files without `gptq_v2`
            return {
                f"{stem}.qweight": pack(codes.codes.t().contiguous(), self.bits, 0),
                f"{stem}.qzeros": pack(zeros.t().contiguous(), self.bits, 1),
                f"{stem}.scales": codes.scales.t().contiguous(),
                f"{stem}.g_idx": codes.groups.to(torch.int32),
            }
        return {
            f"{stem}.weight_packed": pack(codes.codes, self.bits, 1),
            f"{stem}.weight_scale": codes.scales,
            f"{stem}.weight_shape": torch.tensor(codes.codes.shape),
        }

    def config(self, quantised: Sequence[str], kept: Sequence[str], head: str) -> dict[str, Any]:
        """The `quantization_config` of a model; `kept` are layers left in floating point, as `head` always is."""
        if self.settings.rounding == "gptq":
            return self._gptq_config(quantised if kept else ())
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.settings.rounding == "q4" else "channel",
            "group_size": Q4_GROUP if self.settings.rounding == "q4" else None,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": COMPRESSED,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*kept, head],
        }

    def _gptq_config(self, only: Sequence[str]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "quant_method": GPTQ,
            "bits": self.bits,
            "group_size": self.settings.groupsize,
            "damp_percent": self.settings.percdamp,
            "desc_act": False,  # whatever the order of rounding, groups hold inputs in their own
            "static_groups": self.settings.act_order,
            "sym": self.settings.symmetric,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "meta": {"quantizer": [f"funitel:{_version()}"]},
        }
        if only:
            config["modules_in_block_to_quantize"] = [sorted(set(map(_inside_block, only)))]
        return config


def side_files(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Further files by name: AutoGPTQ's own readers look for quantize_config.json."""
    return {"quantize_config.json": config} if config["quant_method"] == GPTQ else {}


def _inside_block(stem: str) -> str:
    """`model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    parts = stem.split(".")
    return ".".join(parts[1 + next(i for i, part in enumerate(parts) if part.isdigit()) :])


def _version() -> str:
    try:
        return version("funitel")
    except PackageNotFoundError:
        return "unknown"
