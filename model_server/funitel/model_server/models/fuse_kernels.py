"""The Triton kernels of a decoder on a GPU, each kind if a check at start finds it right."""

import torch

from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.fuse_elementwise import fuse_elementwise
from funitel.model_server.models.fuse_experts import fuse_experts


def fuse_kernels(
    decoder: Decoder, heads: HeadSplit, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Have a decoder of this precision compute with our kernels over a pool of `kv_dtype`, or say why not."""
    fuse_elementwise(decoder, heads, device, dtype, kv_dtype)
    fuse_experts(decoder, device)
