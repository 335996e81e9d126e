"""A GGUF -> an executor that has llama.cpp compute it, with the facts that it tells the router."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.engines.llama_cpp.forward import LlamaCppForward, LlamaCppPools
from funitel.model_server.engines.llama_cpp.library import MAX_BATCH_TOKENS, LlamaModel, library_version
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.sync_sampling import SyncSampling
from funitel.model_server.executor.warmup import num_rows
from funitel.model_server.files.gguf_pointer import POINTER, check_pointer, part_paths
from funitel.model_server.loading.common import Loaded, find_eos, info_of, log_loaded, options_of, set_threads
from funitel.model_server.loading.executor import LoadedShard
from funitel.model_server.loading.flags import check_honoured, decoder_flags
from funitel.model_server.models.weight_offload import refuse_host_memory
from funitel.model_server.sampling.logits_processors import TorchLogitsProcessors
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError, UnsupportedModel
from funitel.proto.process.usable_cores import count_usable_cores
from funitel.proto.step import Capability, SequenceStart, WarmupLimits, WarmupResult

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 256  # of a context of llama.cpp, LLAMA_MAX_SEQ
_MODELS = "--engine llama_cpp"
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LlamaCppFacts:
    """See ModelFacts; the architecture is llama.cpp's name of it."""

    architecture: str
    vocab_size: int
    max_position_embeddings: int


@dataclass(slots=True)
class MappedWeights:
    """See Footprint: no weight is split."""

    held_bytes: int
    sharded_bytes: int = 0
    total_sharded_bytes: int = 0


class LlamaCppExecutor(Executor):
    """An executor that makes its pool for as many sequences as the router says it will run."""

    llama_pools: LlamaCppPools

    def warmup(self, starts: Sequence[SequenceStart], limits: WarmupLimits) -> WarmupResult:
        """See Executor."""
        self.llama_pools.num_rows = min(num_rows(limits.max_batch_size), MAX_SEQUENCES)
        return super().warmup(starts, limits)


def load_llama_cpp(settings: ModelServerSettings, folder: Path) -> LoadedShard:
    """Load the GGUF that `folder` points to.

    Raises:
        StartupError: the extra is not installed, the model is no GGUF, or the settings are not for this engine.
    """
    _check(settings)
    path = gguf_of(folder)
    device = torch.device("cpu")
    set_threads(settings.num_threads or settings.most_threads)
    codec = TextCodec(folder)
    model = LlamaModel(path)
    eos_token_ids = find_eos(folder, codec)
    num_threads = settings.num_threads or settings.most_threads or count_usable_cores()
    pools = LlamaCppPools(model, model.measure(), settings.block_size, num_threads)
    settings = replace(settings, prefix_caching=False)
    forward = LlamaCppForward()
    facts = LlamaCppFacts(model.architecture, model.vocab_size, model.context)
    loaded = Loaded(
        name=f"llama.cpp ({library_version()})",
        decoder=forward,
        scores=TorchLogitsProcessors(),
        precision="gguf",
        kv_dtype=torch.float16,
        num_threads=num_threads,
        parallel=TensorParallel(),
        footprint=MappedWeights(model.num_bytes),
        step_bytes=lambda num_tokens: (
            pools.state_bytes + _FLOAT_BYTES * model.vocab_size * min(MAX_BATCH_TOKENS, max(num_tokens, pools.num_rows))
        ),
    )
    log_loaded(settings, folder, facts, device, loaded)
    options = options_of(settings, device, loaded, eos_token_ids)
    executor = LlamaCppExecutor(
        facts,
        forward,
        pools,
        codec,
        loaded.parallel,
        options,
        partial(SyncSampling, scores=loaded.scores),
    )
    executor.llama_pools = pools
    executor.batches.table.on_release = forward.release
    info = info_of(settings, options, loaded, model.vocab_size, keeps_states=True, has_parted_blocks=False)
    capabilities = info.capabilities - {Capability.SPECULATION, Capability.ADAPTERS}
    return executor, replace(info, attention_impl="llama.cpp", capabilities=capabilities)


def gguf_of(folder: Path) -> Path:
    """The GGUF that a folder points to; of a split one the first file.

    Raises:
        UnsupportedModel: the folder has weights in another format.
        WeightsError: the file is not what it was.
    """
    if not (folder / POINTER).is_file():
        raise UnsupportedModel(
            f"--engine llama_cpp computes GGUF files, and {folder} has none: name a GGUF as MODEL_ID"
        )
    return part_paths(folder / POINTER, check_pointer(folder / POINTER))[0]


def _check(settings: ModelServerSettings) -> None:
    """Raise SettingsError for what llama.cpp does not do here."""
    if settings.world_size > 1:
        raise SettingsError(f"--num-shard {settings.world_size}: {_MODELS} runs on one shard, and in replicas")
    if settings.device == "cuda":
        raise SettingsError(f"--device cuda: {_MODELS} runs on a CPU here")
    refuse_host_memory(settings, _MODELS)
    if settings.placing is not None:
        raise SettingsError(f"{settings.placing} is not for {_MODELS}")
    given = {
        **decoder_flags(settings),
        "--quantize": None if settings.quantize == "gguf" else settings.quantize,  # as the blocks are
        "--dtype": settings.dtype,
        "--model-spec": settings.model_spec,
        "--draft-model": settings.draft_model,
        "--speculate": settings.speculate or None,
    }
    check_honoured(given, _MODELS)
    if settings.max_lora_rank and settings.reserved_loras:
        raise SettingsError(f"--lora-adapters and --lora-folder are not for {_MODELS}")
