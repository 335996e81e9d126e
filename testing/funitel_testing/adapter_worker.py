"""One rank of a test of adapters: logits of sequences that have different ones, in one batch.

`serve_adapters` is the main function of a rank. Rank 0 saves logits.pt: a list for each step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from funitel.model_server.adapters.registry import LoadedAdapters, PlacedAdapter
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.low_rank import adapter_base
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.models.adapters import take_adapters
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel_testing.forward_worker import (
    BLOCK_SIZE,
    CPU,
    fused_decoder,
    fused_library,
    step_at_random,
    step_through,
)

MAX_RANK = 64


@dataclass
class AdaptedModel:
    """A decoder with the registry of its adapters, and pools for it."""

    spec: ModelSpec
    decoder: Forward
    registry: LoadedAdapters
    parallel: TensorParallel
    dtype: torch.dtype = torch.float32

    @classmethod
    def torch_step(cls, folder: Path, parallel: TensorParallel) -> "AdaptedModel":
        """In torch, in float32."""
        spec = choose_spec(None, folder)
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
        decoder = Decoder(spec, weights, parallel, TorchAttention(BLOCK_SIZE, CPU))
        base = take_adapters(decoder, weights.prefix, torch.float32, CPU)
        return cls(spec, decoder, LoadedAdapters(base, MAX_RANK), parallel)

    @classmethod
    def fused_step(
        cls, folder: Path, parallel: TensorParallel, tier: Tier = Tier.FLOAT32, num_threads: int = 2
    ) -> "AdaptedModel":
        """In the fused step of a tier."""
        spec = choose_spec(None, folder)
        decoder = fused_decoder(folder, tier, parallel, num_threads=num_threads)
        prefix = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False).prefix
        base = adapter_base(spec, decoder.program, parallel, prefix)
        return cls(spec, decoder, LoadedAdapters(base, MAX_RANK), parallel, decoder.kv_dtype)

    def load(self, folders: Sequence[Path | None]) -> list[PlacedAdapter | None]:
        """The adapters in these folders; None for the base alone."""
        return [
            None if folder is None else self.registry.load(folder.name, str(folder), lambda _: False)
            for folder in folders
        ]

    def cache(self, num_blocks: int = 400) -> KVCache:
        """A pool of this rank's heads."""
        spec, parallel = self.spec, self.parallel
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        cache = KVCache(spec, heads, num_blocks, BLOCK_SIZE, self.dtype, CPU)
        layout = StateLayout.of(spec, parallel.size, parallel.rank)
        if layout is not None:
            cache.state_pool = StatePool(layout, 40, CPU)
        return cache

    def logits(
        self,
        prompts: list[list[int]],
        adapters: Sequence[PlacedAdapter | None] = (),
        *,
        num_decode: int = 6,
        chunk: int = 11,
        seed: int | None = None,
    ) -> list[torch.Tensor]:
        """Logits of every position; with a `seed` by `step_at_random`."""
        if seed is not None:
            return step_at_random(self.decoder, self.cache(), prompts, num_decode, seed, adapters)
        return step_through(self.decoder, self.cache(), prompts, num_decode, chunk, adapters)


def serve_adapters(work: Path, rank: int) -> None:
    """Do the job of `work`."""
    job = json.loads((work / "job.json").read_text())
    torch.set_num_threads(1)
    parallel = TensorParallel.join(rank, job["size"], "127.0.0.1", job["port"], CPU)
    folder, prompts = Path(job["folder"]), job["prompts"]
    ranks = SharedMemoryRanks.meet(parallel, fused_library())
    assert isinstance(ranks, SharedMemoryRanks), ranks
    models = [AdaptedModel.torch_step(folder, parallel), AdaptedModel.fused_step(folder, parallel)]
    models.append(AdaptedModel.fused_step(folder, ranks))
    logits = []
    for model in models:
        adapters = model.load([None if each is None else Path(each) for each in job["adapters"]])
        logits.append(model.logits(prompts, adapters))
    if rank == 0:
        torch.save(logits, work / "logits.pt")
    parallel.leave()
