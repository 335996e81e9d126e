"""Whether a decoder on a GPU computes what lies between matrix products in our kernels: if a probe finds them right."""

import logging
from functools import partial

import torch

from funitel.model_server.device.probe_or_fall_back import PROBE_BOUND, check_probe, probe_or_fall_back, reason_of
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.attention import Attention
from funitel.model_server.layers.elementwise import ElementwiseOps, TorchElementwiseOps
from funitel.model_server.models.decoder import Decoder, DecoderLayer
from funitel.model_server.models.mixer import attending_of
from funitel.model_server.models.weight_offload import OffloadedLayer
from funitel.model_server.spec.model_spec import QkNorm

logger = logging.getLogger(__name__)

_POSITIONS = (0, 1, 6, 100, 0)  # of the probe's tokens, the last of which is padding
_BLOCKS, _OFFSETS = (1, 1, 2, 3, 0), (0, 1, 3, 2, 0)
_BLOCK_SIZE = 4
_FLOAT8_BOUND = 6e-2  # over a pool of float8, where a last bit more or less is 1 part in 8


def fuse_elementwise(
    decoder: Decoder, heads: HeadSplit, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Have a decoder of this precision compute with our kernels over a pool of `kv_dtype`, or say why not."""
    if device.type != "cuda" or decoder.spec.mlp_layers or not decoder.spec.has_mlp:
        return
    if not decoder.spec.attention_layers:  # of a pipeline stage
        return

    def fall_back(error: Exception) -> None:
        message = "norms, positions and gates are computed in torch, without the Triton kernels: %s"
        logger.warning(message, reason_of(error))

    probe_or_fall_back(partial(_fuse, decoder, heads, device, dtype, kv_dtype), fall_back)


def _fuse(decoder: Decoder, heads: HeadSplit, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    # Triton: seconds to import, and there with torch's builds for GPUs only
    from funitel.model_server.layers.elementwise_kernels import TritonElementwiseOps

    elementwise = TritonElementwiseOps(kv_dtype)
    with torch.inference_mode():
        check_elementwise(elementwise, decoder, heads, device, dtype, kv_dtype)
    decoder.adopt(elementwise)
    logger.info("norms, positions and gates are computed in Triton kernels")


def check_elementwise(
    elementwise: ElementwiseOps,
    decoder: Decoder,
    heads: HeadSplit,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    """Raise ValueError unless it gives what the reference gives with the weights of the first layer that attends.

    Its kernels are compiled on the way, so that no request waits for them.
    """
    layer, generator = _probed_layer(decoder), seeded_generator(0, device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    x, result = drawn(len(_POSITIONS), decoder.spec.hidden_size), drawn(len(_POSITIONS), decoder.spec.hidden_size)
    gates = [drawn(len(_POSITIONS), 2 * mlp.num_units) for mlp in layer.mlp.mlps()[-1:] if mlp.is_gated]
    results = []
    for each in (TorchElementwiseOps(), elementwise):
        found = [] if decoder.final_norm is None else [each.norm(decoder.final_norm, x)]
        residuals = layer.attention_residual, layer.mlp_residual
        for block, following in (residuals, residuals[::-1]):
            found += each.join(x, result, block.after, block.scale, following.before)
        found += [each.gate(gate, decoder.spec.activation) for gate in gates]
        results.append(found)
    attending = attending_of(layer.attention)
    if isinstance(attending, Attention) and decoder.spec.qk_norm is not QkNorm.WHOLE:  # which asks other ranks
        qkv = drawn(len(_POSITIONS), heads.num_heads + 2 * heads.num_kv_heads, decoder.spec.head_dim)
        for each, found in zip((TorchElementwiseOps(), elementwise), results, strict=True):
            found += _placed(each, decoder, attending, heads, qkv, kv_dtype)
    bound = _FLOAT8_BOUND if kv_dtype.itemsize == 1 else PROBE_BOUND
    for expected, got in zip(*results, strict=True):
        check_probe(got, expected, bound)


def _probed_layer(decoder: Decoder) -> DecoderLayer:
    """The first layer that attends, with its weights there, wherever they are kept."""
    found = decoder.layers[decoder.spec.attention_layers[0] - decoder.spec.held_layers.start]
    layer = found.fetch() if isinstance(found, OffloadedLayer) else found
    assert isinstance(layer, DecoderLayer)
    return layer


def _placed(
    elementwise: ElementwiseOps,
    decoder: Decoder,
    attention: Attention,
    heads: HeadSplit,
    qkv: torch.Tensor,
    kv_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Queries and the pool after heads were placed in it."""
    device = qkv.device
    spec = decoder.spec.of_one_layer()
    cache = KVCache(spec, heads, max(_BLOCKS) + 1, _BLOCK_SIZE, kv_dtype, device)
    positions = torch.tensor(_POSITIONS, device=device)
    rotations = {
        rotary.spec: rotary.rotation(positions, positions + 1 if rotary.needs_reaches else None, qkv.dtype)
        for rotary in decoder.token_embedding.rotaries
    }
    rotation = None if attention.rotary is None else rotations[attention.rotary]
    slots = torch.tensor(_BLOCKS, device=device), torch.tensor(_OFFSETS, device=device)
    return [elementwise.place(qkv, attention.heads, rotation, cache, 0, slots), cache.pool]
