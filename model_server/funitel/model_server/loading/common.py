"""What every loader shares: the device, ranks and threads of a shard, its options, and what it tells the router."""

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from funitel.model_server.adapters.registry import AdapterBase
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.device.stages import Stage
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.interface import ExecutorOptions
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.pool import KVCache, Pools
from funitel.model_server.kv_cache.precision import KvDtype, kv_label
from funitel.model_server.kv_cache.state_pool import StateLayout
from funitel.model_server.sampling.logits_processors import LogitsProcessors, TorchLogitsProcessors
from funitel.model_server.sampling.sampler import Watermark
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelFacts, ModelSpec
from funitel.proto.errors import SettingsError, WeightsError
from funitel.proto.process.usable_cores import count_usable_cores
from funitel.proto.step import Capability, ShardInfo

logger = logging.getLogger(__name__)


class Footprint(Protocol):
    """What weights take, as `Weights` counts it."""

    held_bytes: int
    sharded_bytes: int
    total_sharded_bytes: int


class TorchFootprint(Footprint, Protocol):
    """The same of weights that torch has, in their precision."""

    dtype: torch.dtype


@dataclass(slots=True)
class Bytes:
    """See Footprint."""

    held_bytes: int
    sharded_bytes: int
    total_sharded_bytes: int

    @classmethod
    def of(cls, *parts: Footprint) -> "Bytes":
        """Those of several together."""
        return cls(
            sum(part.held_bytes for part in parts),
            sum(part.sharded_bytes for part in parts),
            sum(part.total_sharded_bytes for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A decoder, and what the rest of the shard must know of it.

    `precision` is that of the weights, `parallel` the ranks as the decoder reduces over them, `step_bytes` the memory
    of a step of so many tokens, where it is known before. `takes_device_tokens`: of a batch's tokens it reads the
    tensor alone, so that some may be known to the device only. `adapters` is what takes adapters; None: the model
    takes none. `stage` is this rank's place among pipeline stages; None: there is one. `key_frames` identifies what is
    done to keys before they are codes. `pools` are those of a model in parts, of which `gpu_blocks` is what the options
    have; None: the model has one pool, as its spec says.
    """

    name: str
    decoder: Forward
    scores: LogitsProcessors
    precision: str
    kv_dtype: KvDtype
    num_threads: int
    parallel: TensorParallel
    footprint: Footprint
    step_bytes: Callable[[int], int] | None = None
    takes_device_tokens: bool = False
    adapters: AdapterBase | None = None
    stage: Stage | None = None
    key_frames: str = ""
    pools: Pools | None = None
    gpu_blocks: tuple[torch.device, int] | None = None

    @property
    def kv_precision(self) -> str:
        """Name of the precision of keys and values."""
        return kv_label(self.kv_dtype)


def in_torch(
    decoder: Forward, weights: TorchFootprint, parallel: TensorParallel, kv_dtype: torch.dtype | None = None
) -> Loaded:
    """What the rest of the shard must know of a model that torch computes; the pool is in its precision or another."""
    return Loaded(
        name="torch",
        decoder=decoder,
        scores=TorchLogitsProcessors(),
        precision=str(weights.dtype),
        kv_dtype=kv_dtype or weights.dtype,
        num_threads=torch.get_num_threads(),
        parallel=parallel,
        footprint=weights,
    )


def log_memory(
    settings: ModelServerSettings,
    spec: ModelSpec,
    parallel: TensorParallel,
    predicted: int,
    measured: int,
    kv_dtype: KvDtype,
) -> None:
    """Say what weights were to take and took, and what a token takes in the pool."""
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    block_bytes = KVCache.bytes_per_block(spec, heads, settings.block_size, kv_dtype)
    logger.info(
        "memory predicted_weight_bytes=%d measured_bytes=%d kv_bytes_per_token=%d",
        predicted,
        measured,
        block_bytes // settings.block_size,
    )


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


def options_of(
    settings: ModelServerSettings, device: torch.device, loaded: Loaded, eos_token_ids: frozenset[int]
) -> ExecutorOptions:
    """What the executor is told at start."""
    return ExecutorOptions(
        device=device,
        dtype=loaded.kv_dtype,
        block_size=settings.block_size,
        memory_fraction=settings.cuda_memory_fraction,
        num_replicas=settings.replicas_on_host,
        allow_prefill_logprobs=settings.enable_prefill_logprobs,
        eos_token_ids=eos_token_ids,
        watermark=Watermark(settings.watermark_gamma, settings.watermark_delta),
        host_bytes=host_bytes(settings, device),
        step_bytes=loaded.step_bytes,
        gpu_blocks=loaded.gpu_blocks,
        reserved_bytes=reserved_bytes(settings, loaded),
        forces_spans=not settings.disable_forced_spans,
        wipes_blocks=loaded.name != "fused",
        has_prefix_cache=settings.prefix_caching,
    )


def reserved_bytes(settings: ModelServerSettings, loaded: Loaded) -> int:
    """Bytes that the pool leaves for adapters."""
    if loaded.adapters is None or not settings.reserved_loras:
        return 0
    num_bytes = settings.reserved_loras * loaded.adapters.max_bytes(settings.max_lora_rank)
    message = "the KV pool leaves %d bytes for %d adapters of rank %d"
    logger.info(message, num_bytes, settings.reserved_loras, settings.max_lora_rank)
    return num_bytes


def host_bytes(settings: ModelServerSettings, device: torch.device) -> int:
    """Bytes of the host's memory for evicted blocks; beside a pool on the host, or without a cache, there are none."""
    if device.type != "cuda":
        return 0
    if settings.kv_host_gb and not settings.prefix_caching:
        logger.warning("--kv-host-gb %g changes nothing without --prefix-caching", settings.kv_host_gb)
        return 0
    return int(settings.kv_host_gb * 2**30)


def join_ranks(settings: ModelServerSettings, device: torch.device) -> TensorParallel:
    """Wait for the other ranks; alone there are none."""
    if not settings.sharded or settings.world_size == 1:
        return TensorParallel()
    check_master(settings)
    address = settings.master_addr, settings.master_port
    return TensorParallel.join(settings.rank, settings.world_size, *address, device)


def check_master(settings: ModelServerSettings) -> None:
    """Raise SettingsError unless the host of rank 0 can be found."""
    try:
        socket.getaddrinfo(settings.master_addr, settings.master_port)
    except OSError as error:
        raise SettingsError(f"MASTER_ADDR {settings.master_addr} is no host that can be found: {error}") from error


def info_of(
    settings: ModelServerSettings,
    options: ExecutorOptions,
    loaded: Loaded,
    vocab_size: int,
    *,
    keeps_states: bool,
    has_parted_blocks: bool,
) -> ShardInfo:
    """The facts this rank tells the router.

    `keeps_states`: of sequences, beside what is in blocks. `has_parted_blocks`: a block holds what its own tokens are,
    and nothing of its sequence as a whole, so that sequences can share it.
    """
    max_lora_rank = settings.max_lora_rank if loaded.adapters is not None else 0
    rare = {Capability.FIRST_TOKEN, Capability.MEDIA}  # see load_seq2seq
    if not (keeps_states and settings.prefix_caching):
        rare.add(Capability.STATE_SLOTS)
    if not max_lora_rank:
        rare.add(Capability.ADAPTERS)
    if loaded.stage is None:
        rare.add(Capability.STAGES)
    if not has_parted_blocks or (keeps_states and not settings.prefix_caching):
        rare.add(Capability.BLOCK_FORKS)
    return ShardInfo(
        dtype=loaded.precision,
        device_type=options.memory_device.type,
        support_chunking=settings.prefill_chunking,
        use_prefix_caching=settings.prefix_caching and not keeps_states,
        attention_impl=TorchAttention.name,
        block_size=options.block_size,
        capabilities=frozenset(Capability) - rare,
        rank=settings.rank,
        world_size=settings.world_size,
        weight_bytes=loaded.footprint.held_bytes,
        sharded_weight_bytes=loaded.footprint.sharded_bytes,
        total_sharded_weight_bytes=loaded.footprint.total_sharded_bytes,
        vocab_size=vocab_size,
        max_lora_rank=max_lora_rank,
        eos_token_ids=options.eos_token_ids,
        num_stages=0 if loaded.stage is None else loaded.stage.num_stages,
        stage=0 if loaded.stage is None else loaded.stage.index,
    )


def refuse_stages(settings: ModelServerSettings, what: str) -> None:
    """Raise SettingsError where stages, whole experts or parts of a model are asked for, which `what` cannot have."""
    if settings.stages is not None:
        raise SettingsError(f"--partition {settings.partition} is for decoders of the table of models, not {what}")
    if settings.expert_parallel:
        raise SettingsError(f"--expert-parallel is for decoders of the table of models, not {what}")
    if settings.placing is not None:
        raise SettingsError(f"{settings.placing} is for decoders of the table of models, not {what}")


def check_ranks(settings: ModelServerSettings, spec: ModelSpec) -> None:
    """Raise SettingsError for more ranks than a model can be split over."""
    size, rank = settings.num_tensor_ranks, settings.tensor_rank
    HeadSplit.of(spec.num_heads, spec.num_kv_heads, size, rank)
    StateLayout.of(spec, size, rank)


def set_threads(asked: int | None) -> None:
    """Compute with so many threads, or as many as there are cores that it may use."""
    torch.set_num_threads(asked or count_usable_cores())


def choose_device(asked: str, number: int) -> torch.device:
    """The device of a rank: its GPU, by the number on this machine, where one is wanted and there, else the CPU."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if number >= torch.cuda.device_count():
        raise SettingsError(f"this shard needs GPU number {number}, there are {torch.cuda.device_count()}")
    device = torch.device("cuda", number)
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
