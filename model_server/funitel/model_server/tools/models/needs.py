"""What serving a model would take on this machine, from headers and configurations: no weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from funitel.model_server.checkpoint.storage import open_file
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import Tier, choose_tier
from funitel.model_server.device.gpu import CardState, Gpu
from funitel.model_server.device.memory import free_bytes
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.gpu_pool_sizing import pool_budget
from funitel.model_server.executor.pool_sizing import MOST_POOL_TOKENS, host_share
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.loading.torch_footprint import SizedProducts, torch_weight_bytes
from funitel.model_server.models.encoder_decoder.model import Seq2Seq
from funitel.model_server.models.transformers_fallback.pool import FallbackPools
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.quantized.select import MADE as MADE_ON_GPU
from funitel.model_server.registry.choose import choose_spec
from funitel.model_server.registry.encoder_decoders import is_seq2seq, seq2seq_spec_of
from funitel.model_server.registry.encoders import encoder_spec_of, is_encoder
from funitel.model_server.registry.row import Config
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import NoRow, SettingsError

if TYPE_CHECKING:
    from funitel.model_server.tools.models.transformers_estimate import TransformersEstimate

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of one model. `weights` are bytes of each rank, `blocks` the bytes of a block of KV of each; empty without KV."""

    architecture: str
    served_by: str
    why: str = ""  # ... and not by a faster path
    precision: str
    kv_precision: str = ""
    context: int  # tokens
    weights: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    free: int = 0  # bytes of the machine, or of each rank's GPU
    pool: int = 0  # tokens

    @property
    def fits(self) -> bool:
        """Whether weights and, where there is one, a pool for at least one block have room."""
        return self.free > sum(self.weights) and (not self.blocks or self.pool > 0)


def needs_of(settings: ModelsSettings, folder: Path) -> Needs:
    """What serving the model in `folder` takes with these settings.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_json(folder / "config.json")
    if is_encoder(config):
        return _of_encoder(settings, folder)
    if settings.model_spec is None and is_seq2seq(config):
        return _of_seq2seq(settings, folder, config)
    try:
        spec = choose_spec(settings.model_spec, folder)
    except NoRow as no_row:
        # transformers' models: seconds to import, not wanted for those of the table
        from funitel.model_server.tools.models.transformers_estimate import forecast

        return _of_fallback(settings, forecast(settings, folder, no_row), no_row.why)
    return _of_spec(settings, folder, spec)


def _of_spec(settings: ModelsSettings, folder: Path, spec: ModelSpec) -> Needs:
    device = choose_device(settings.device, 0)
    ranks = [TensorParallel(rank, settings.num_shard, _META) for rank in range(settings.num_shard)]
    heads = [HeadSplit.of(spec.num_heads, spec.num_kv_heads, rank.size, rank.rank) for rank in ranks]
    weights = Weights(folder, choose_dtype(settings.dtype, device), _META, spec.names.prefix, is_shown=False)
    tier = None
    if device.type == "cpu":
        tier = choose_tier(settings.dtype, settings.quantize, weights.quantization, has_blocks=weights.has_blocks)
    made = MADE_ON_GPU.get(settings.quantize or "") if device.type == "cuda" else None
    if weights.quantization is not None or (tier is None and made is None):
        check_flag(settings.quantize, weights.quantization)
    if device.type == "cuda" and (weights.quantization is not None or made is not None):
        weights.products = SizedProducts(made)
    reason = f"the fused step is for CPUs, not {device.type}" if tier is None else missing(spec)
    if tier is not None and reason is None:
        held = [weight_bytes(spec, rank, tier, weights.block_type) for rank in ranks]
        kv_dtype = torch.float16 if tier.has_half_kv else torch.float32
        served_by, precision = "the fused C++ step", "the GGUF's blocks" if tier is Tier.GGUF else tier.label
    else:
        held, kv_dtype = (
            [
                torch_weight_bytes(spec, rank.rank, rank.size, weights.dtype, device, checkpoint=weights)
                for rank in ranks
            ],
            weights.dtype,
        )
        served_by, precision = "torch", name_of(weights.dtype)
    facts = Needs(
        architecture=spec.architecture,
        served_by=served_by,
        why=reason or "",
        precision=precision,
        kv_precision=name_of(kv_dtype),
        context=spec.max_position_embeddings,
        weights=tuple(held),
    )
    return with_pool(facts, settings, [SpecPools(spec, each, settings.block_size, kv_dtype, device) for each in heads])


def _of_seq2seq(settings: ModelsSettings, folder: Path, config: Config) -> Needs:
    spec = seq2seq_spec_of(config)
    device = choose_device(settings.device, 0)
    dtype, size = choose_dtype(settings.dtype, device), settings.num_shard
    checkpoint = Weights(folder, dtype, _META, spec.decoder.names.prefix, is_shown=False)
    check_flag(settings.quantize, checkpoint.quantization)

    def build(weights: Weights, parallel: TensorParallel) -> ModelSpec:
        return replace(spec.decoder, is_tied=Seq2Seq(spec, weights, parallel).is_tied)

    def held(rank: int) -> int:
        return torch_weight_bytes(spec.decoder, rank, size, dtype, device, build, checkpoint)

    heads = [HeadSplit.of(spec.decoder.num_heads, spec.decoder.num_kv_heads, size, rank) for rank in range(size)]
    facts = Needs(
        architecture=spec.decoder.architecture,
        served_by="torch, as an encoder-decoder",
        precision=name_of(dtype),
        kv_precision=name_of(dtype),
        context=spec.whole.max_position_embeddings,
        weights=tuple(map(held, range(size))),
    )
    return with_pool(facts, settings, [SpecPools(spec.whole, h, settings.block_size, dtype, device) for h in heads])


def _of_encoder(settings: ModelsSettings, folder: Path) -> Needs:
    if settings.num_shard > 1:
        raise SettingsError(
            f"--num-shard {settings.num_shard}: an encoder is not split over shards, but runs in replicas"
        )
    device = choose_device(settings.device, 0)
    dtype = choose_dtype(settings.dtype, device)
    spec = encoder_spec_of(read_json(folder / "config.json"))
    facts = Needs(
        architecture=spec.architecture,
        served_by="torch, as an encoder",
        precision=name_of(dtype),
        context=spec.max_tokens,
        weights=(count_elements(folder) * dtype.itemsize,),
    )
    return replace(facts, free=free_bytes(device))


def _of_fallback(settings: ModelsSettings, found: "TransformersEstimate", why: str) -> Needs:
    device = choose_device(settings.device, 0)
    dtype = choose_dtype(settings.dtype, device)
    facts = Needs(
        architecture=found.architecture,
        served_by="transformers, over our blocks",
        why=why,
        precision=name_of(dtype),
        kv_precision=name_of(dtype),
        context=found.context,
        weights=tuple(each * dtype.itemsize for each in found.num_elements),
        free=free_bytes(device),
    )
    if found.kept is None:
        return facts
    size = found.kept.fit_block(settings.block_size, found.context, dtype)
    pools = FallbackPools(found.kept, size, dtype, device, settings.num_shard)
    return with_pool(facts, settings, [pools] * settings.num_shard)


def count_elements(folder: Path) -> int:
    """Elements of all tensors of a checkpoint."""
    files = [open_file(path) for path in weight_files(folder)]
    return sum(prod(file.get_slice(name).get_shape()) for file, names in files for name in names)


def with_pool(facts: Needs, settings: ModelsSettings, pools: Sequence[Pools]) -> Needs:
    """The needs with what a block takes on each rank, and with the pool that would have room beside the weights."""
    device = choose_device(settings.device, 0)
    free, size = free_bytes(device), pools[0].block_size
    fraction = settings.cuda_memory_fraction
    if device.type == "cpu":
        share = host_share(free - sum(facts.weights), fraction, len(facts.weights))
    else:  # each rank has a GPU of its own; what a step takes is known when it is loaded
        held = max(facts.weights)
        share = pool_budget(CardState(total=Gpu(device).state().total, free=free - held, held=held), fraction, 0)
    num_blocks = min(share // each.bytes_per_block for each in pools) - 1  # block 0 is never a sequence's
    return replace(
        facts,
        blocks=tuple(each.bytes_per_block for each in pools),
        block_size=size,
        free=free,
        pool=max(0, min(num_blocks, MOST_POOL_TOKENS // size)) * size,
    )


def name_of(dtype: torch.dtype) -> str:
    """A precision as flags call it."""
    return str(dtype).removeprefix("torch.")
