"""Checkpoint folder -> loaded executor: spec, ranks, weights, tokenizer, in that order."""

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import MADE, Tier, choose_tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.async_executor import AsyncExecutor
from funitel.model_server.executor.executor import Executor, ExecutorOptions
from funitel.model_server.files.integrity import read_json
from funitel.model_server.gpu_sampling.select import choose_maths
from funitel.model_server.hub.resolve import is_outdated
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.loading.backend import Loaded, load_fused, load_torch
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.quantized.select import MADE as MADE_ON_GPU
from funitel.model_server.sampling.watermark import Watermark
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelFacts, ModelSpec, Position
from funitel.model_server.tools.spec import choose_spec
from funitel.proto.errors import NoRow, SettingsError, WeightsError
from funitel.proto.step import Capability, ShardInfo

logger = logging.getLogger(__name__)


def load(settings: ModelServerSettings, folder: Path) -> tuple[Executor, ShardInfo]:
    """Load this rank's share of the model in `folder`; blocks until every rank has joined.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    device = choose_device(settings.device, settings.rank)
    set_threads(settings.num_threads or settings.most_threads)
    if settings.kv_cache_dtype is not None and device.type == "cpu":
        raise SettingsError(
            f"--kv-cache-dtype {settings.kv_cache_dtype} is for GPUs, this is a CPU: keys and values have the "
            f"precision of the step; leave it out"
        )
    if device.type == "cpu":
        _tell_of_gpu_settings(settings)
    try:
        spec = _stretched(choose_spec(settings.model_spec, folder), settings)
    except NoRow as no_row:
        return _load_fallback(settings, folder, no_row, device)
    HeadSplit.of(spec.num_heads, spec.num_kv_heads, settings.world_size, settings.rank)  # refuses too many ranks
    weights = Weights(folder, choose_dtype(settings.dtype, device), device, spec.names.prefix)
    tier = None
    if device.type == "cpu":
        tier = choose_tier(settings.dtype, settings.quantize, weights.quantization, has_blocks=weights.has_blocks)
        if tier is Tier.INT8 and not weights.has_blocks and is_outdated(folder):
            logger.warning("%s was converted by an older version, without blocks: name the GGUF as --model-id", folder)
    made = MADE if tier is not None else MADE_ON_GPU if device.type == "cuda" else {}
    if settings.quantize not in made or weights.quantization is not None:
        check_flag(settings.quantize, weights.quantization)
    codec = TextCodec(folder)
    eos_token_ids = find_eos(folder, codec)
    parallel = join_ranks(settings, device)
    loaded = load_fused(settings, spec, weights, parallel, tier) if tier is not None else None
    loaded = loaded or load_torch(settings, spec, weights, parallel)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    pools = SpecPools(spec, heads, settings.block_size, loaded.kv_dtype, device)
    options = options_of(settings, device, loaded, eos_token_ids)
    return _finish(settings, folder, spec, loaded, pools, codec, options)


def _tell_of_gpu_settings(settings: ModelServerSettings) -> None:
    """Say of settings that are for GPUs that they change nothing on a CPU."""
    given = {
        "--cuda-graphs": settings.cuda_graphs,
        "--attention": settings.attention,
        "--cpu-offload-gb": settings.cpu_offload_gb or None,
        "--kv-host-gb": settings.kv_host_gb or None,
    }
    for flag, value in given.items():
        if value is not None:
            logger.info("%s %s changes nothing: the model runs on a CPU", flag, value)


def _load_fallback(
    settings: ModelServerSettings, folder: Path, no_row: NoRow, device: torch.device
) -> tuple[Executor, ShardInfo]:
    """Load a model that no row of the table describes."""
    # transformers' models: seconds to import, not wanted for those of the table
    from funitel.model_server.loading.transformers import load_fallback

    codec = TextCodec(folder)
    eos_token_ids = find_eos(folder, codec)
    dtype = choose_dtype(settings.dtype, device)
    model = load_fallback(settings, folder, no_row, dtype, device, lambda: join_ranks(settings, device))
    settings = replace(
        settings,
        block_size=model.pools.block_size,
        prefill_chunking=settings.prefill_chunking and model.takes_chunks,
        prefix_caching=settings.prefix_caching and model.shares_prefixes,
    )
    options = options_of(settings, device, model.loaded, eos_token_ids)
    return _finish(settings, folder, model, model.loaded, model.pools, codec, options)


def _finish(
    settings: ModelServerSettings,
    folder: Path,
    spec: ModelFacts,
    loaded: Loaded,
    pools: Pools,
    codec: TextCodec,
    options: ExecutorOptions,
) -> tuple[Executor, ShardInfo]:
    log_loaded(settings, folder, spec, options.device, loaded)
    if options.device.type == "cuda" and loaded.takes_held_tokens:
        maths = choose_maths(options.device)
        executor: Executor = AsyncExecutor(spec, loaded.decoder, pools, codec, loaded.parallel, options, maths)
    else:
        executor = Executor(spec, loaded.decoder, pools, codec, loaded.parallel, options, loaded.scores)
    return executor, info_of(settings, options, loaded, spec.vocab_size)


def log_loaded(
    settings: ModelServerSettings, folder: Path, spec: ModelFacts, device: torch.device, loaded: Loaded
) -> None:
    """Say what is served, and how."""
    logger.info(
        "loaded model=%s architecture=%s device=%s step=%s precision=%s threads=%d collectives=%s weight_bytes=%d",
        folder,
        spec.architecture,
        device,
        loaded.name,
        loaded.precision,
        loaded.num_threads,
        loaded.parallel.name,
        loaded.footprint.held_bytes,
    )
    if loaded.name != "fused":
        warn_of_spin(settings)


def warn_of_spin(settings: ModelServerSettings) -> None:
    """Say of a model without the fused step that a flag for its threads changes nothing, if it is given."""
    if settings.thread_spin_us is not None:
        message = "--thread-spin-us %d changes nothing: the fused CPU step, whose threads spin, does not run"
        logger.warning(message, settings.thread_spin_us)


def _stretched(spec: ModelSpec, settings: ModelServerSettings) -> ModelSpec:
    """The spec with the rotary positions that the settings ask for."""
    if settings.rope_scaling is None and settings.rope_factor is None:
        return spec
    if spec.position is not Position.ROTARY:
        logger.warning("--rope-scaling and --rope-factor change nothing: %s has no rotary positions", spec.architecture)
        return spec
    return spec.stretched(settings.rope_factor or 1.0)


def options_of(
    settings: ModelServerSettings, device: torch.device, loaded: Loaded, eos_token_ids: frozenset[int]
) -> ExecutorOptions:
    """What the executor is told at start."""
    return ExecutorOptions(
        device=device,
        dtype=loaded.kv_dtype,
        block_size=settings.block_size,
        memory_fraction=settings.cuda_memory_fraction,
        allow_prefill_logprobs=settings.enable_prefill_logprobs,
        eos_token_ids=eos_token_ids,
        watermark=Watermark(settings.watermark_gamma, settings.watermark_delta),
        host_bytes=host_bytes(settings, device),
        step_bytes=loaded.step_bytes,
        forces_spans=not settings.disable_forced_spans,
        wipes_blocks=loaded.name != "fused",
    )


def host_bytes(settings: ModelServerSettings, device: torch.device) -> int:
    """Bytes of the host's memory for evicted blocks; beside a pool on the host, or without a cache, there are none."""
    if device.type != "cuda":
        return 0
    if settings.kv_host_gb and not settings.prefix_caching:
        logger.info("--kv-host-gb %g changes nothing without --prefix-caching", settings.kv_host_gb)
        return 0
    return int(settings.kv_host_gb * 2**30)


def join_ranks(settings: ModelServerSettings, device: torch.device) -> TensorParallel:
    """Wait for the other ranks; alone there are none."""
    if not settings.sharded or settings.world_size == 1:
        return TensorParallel()
    try:
        socket.getaddrinfo(settings.master_addr, settings.master_port)
    except OSError as error:
        raise SettingsError(f"MASTER_ADDR {settings.master_addr} is no host that can be found: {error}") from error
    address = settings.master_addr, settings.master_port
    return TensorParallel.join(settings.rank, settings.world_size, *address, device)


def info_of(settings: ModelServerSettings, options: ExecutorOptions, loaded: Loaded, vocab_size: int) -> ShardInfo:
    """The facts this rank tells the router."""
    return ShardInfo(
        dtype=loaded.precision,
        device_type=options.device.type,
        support_chunking=settings.prefill_chunking,
        use_prefix_caching=settings.prefix_caching,
        attention_impl=TorchAttention.name,
        block_size=options.block_size,
        capabilities=frozenset(Capability) - {Capability.FIRST_TOKEN},  # see load_seq2seq
        rank=settings.rank,
        world_size=settings.world_size,
        weight_bytes=loaded.footprint.held_bytes,
        sharded_weight_bytes=loaded.footprint.sharded_bytes,
        total_sharded_weight_bytes=loaded.footprint.total_sharded_bytes,
        vocab_size=vocab_size,
    )


def set_threads(asked: int | None) -> None:
    """Compute with so many threads, or as many as there are cores for this process."""
    torch.set_num_threads(asked or len(os.sched_getaffinity(0)))


def choose_device(asked: str, rank: int) -> torch.device:
    """The device of a rank: cuda:RANK where a GPU is wanted and there, else the CPU."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise SettingsError(f"rank {rank} needs GPU number {rank}, there are {torch.cuda.device_count()}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def choose_dtype(asked: str | None, device: torch.device) -> torch.dtype:
    """Precision of weights and KV: what is asked for, else float32 on a CPU and bfloat16 on a GPU."""
    name = asked or ("float32" if device.type == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def find_eos(folder: Path, codec: TextCodec) -> frozenset[int]:
    """End-of-sequence token ids: of generation_config.json, else config.json, else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(isinstance(token_id, int) for token_id in ids):
                    raise WeightsError(f"{folder / name}: eos_token_id must be one or more integers, given {found!r}")
                return frozenset(ids)
    if (folder / "tokenizer_config.json").is_file():
        token = read_json(folder / "tokenizer_config.json").get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        token_id = codec.token_id(content) if content else None
        if token_id is not None:
            return frozenset([token_id])
    raise WeightsError(f"{folder} names no end-of-sequence token (eos_token_id in generation_config.json)")
