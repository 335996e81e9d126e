"""A decoder loaded in torch: any device, any spec, with kernels where a GPU runs them."""

from dataclasses import replace

from funitel.model_server.attention.select import choose_attention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.memory import bytes_in_use
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.device.torch_import import register_shapes
from funitel.model_server.kv_cache.precision import is_float8, torch_kv_dtype
from funitel.model_server.loading.common import Loaded, in_torch, log_memory
from funitel.model_server.models.adapters import take_adapters
from funitel.model_server.models.cuda_graphs import recorded
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.models.fuse_kernels import fuse_kernels
from funitel.model_server.models.stage_boundary import StageBoundary
from funitel.model_server.models.weight_offload import offload_of
from funitel.model_server.quantized.select import choose_products
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec


def load_torch(
    settings: ModelServerSettings,
    spec: ModelSpec,
    weights: Weights,
    parallel: TensorParallel,
    link: StageLink | None = None,
) -> Loaded:
    """The readable decoder: every device, every spec, in the precision of `weights`."""
    register_shapes()
    weights.products = choose_products(settings.quantize, weights.quantization, weights.device, weights.dtype)
    kept = weights if weights.products is not None else None
    place, spread = (spec, parallel.rank, parallel.size), parallel.spreads_experts
    predicted = torch_weight_bytes(*place, weights.dtype, weights.device, checkpoint=kept, spreads_experts=spread)
    before = bytes_in_use(weights.device)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    kv_dtype = torch_kv_dtype(settings.kv_cache_dtype, weights.dtype)
    attention = choose_attention(
        spec, heads, settings.block_size, weights.device, weights.dtype, kv_dtype, settings.attention
    )
    weights.scales_kv = is_float8(kv_dtype)
    offload = offload_of(settings.cpu_offload_gb, spec.num_layers, weights.device)
    takes_adapters = settings.max_lora_rank > 0 and offload is None
    boundary = None if link is None else StageBoundary(link, weights.dtype, weights.device)
    decoder = Decoder(spec, weights, parallel, attention, offload, boundary)
    fuse_kernels(decoder, heads, weights.device, weights.dtype, kv_dtype=kv_dtype)
    log_memory(settings, spec, parallel, predicted, bytes_in_use(weights.device) - before, kv_dtype)
    loaded = in_torch(recorded(decoder, settings.cuda_graphs), weights, parallel, kv_dtype)
    adapters = take_adapters(decoder, weights.prefix, weights.dtype, weights.device) if takes_adapters else None
    return replace(loaded, takes_device_tokens=True, adapters=adapters)
