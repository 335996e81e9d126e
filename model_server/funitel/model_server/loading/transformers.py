"""Checkpoint folder -> a model of transformers that steps like ours, by the way of serving it that computes right."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.device.torch_import import register_shapes
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.common import Loaded
from funitel.model_server.loading.flags import check_honoured, check_quantize, decoder_flags
from funitel.model_server.models.transformers_fallback.cache_adapters import choose_adapter
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.load import (
    check_steps,
    expected_logits,
    hollow,
    load_model,
    named,
    read_config,
    translating_errors,
)
from funitel.model_server.models.transformers_fallback.packed import PackedModel
from funitel.model_server.models.transformers_fallback.padded import StackedModel
from funitel.model_server.models.transformers_fallback.pool import FallbackPools
from funitel.model_server.models.transformers_fallback.tensor_parallel import Split, WeightCount, check_device
from funitel.model_server.models.weight_offload import refuse_host_memory
from funitel.model_server.sampling.logits_processors import TorchLogitsProcessors
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError, NoRow, Unsuited, UnsupportedModel

logger = logging.getLogger(__name__)

# What configurations call the longest sequence. A state has no end: there the tokenizer's word counts, or this bound.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
_UNBOUNDED_CONTEXT = 8192  # tokens

Way = Callable[[Any], PackedModel | StackedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackModel:
    """A loaded model with what the rest of the shard must know of it. See `ModelFacts` for the first two."""

    vocab_size: int
    max_position_embeddings: int
    architecture: str
    loaded: Loaded
    pools: FallbackPools
    takes_chunks: bool  # of prompts, in several steps
    shares_prefixes: bool


def load_fallback(
    settings: ModelServerSettings,
    folder: Path,
    no_row: NoRow,
    dtype: torch.dtype,
    device: torch.device,
    join: Callable[[], TensorParallel],
) -> FallbackModel:
    """Load this rank's share of the model in `folder`, which no row of the table describes; `join` meets the others.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    register_shapes()
    config = read_config(folder, no_row, trusts_code=settings.trust_remote_code)
    models = models_without(no_row)
    refuse_host_memory(settings, models)
    check_quantize(settings.quantize, folder, models)
    check_honoured({**decoder_flags(settings), "--quantize": None}, models)
    split = None
    if settings.world_size > 1:
        check_device(device, settings.world_size)
        split = Split.of(hollow(config, trusts_code=settings.trust_remote_code), settings.world_size)
    parallel = join()
    model = load_model(folder, config, dtype, device, split, trusts_code=settings.trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    context = context_of(text_config, folder)
    forward, pools = _choose_way(
        model, text_config.vocab_size, context, settings.block_size, dtype, device, parallel.size
    )
    name = named(read_json(folder / "config.json"))
    logger.info(
        "%s runs through transformers (%s): %s; its weights are %s, as int8 and blocks are for the table's models",
        name,
        _HOW[forward.name],
        no_row.why,
        dtype,
    )
    return FallbackModel(
        vocab_size=text_config.vocab_size,
        max_position_embeddings=context,
        architecture=name,
        loaded=Loaded(
            name=f"transformers-{forward.name}",
            decoder=forward if split is None else _OnFirstRank(forward, parallel),
            scores=TorchLogitsProcessors(),
            precision=str(dtype),
            kv_dtype=dtype,
            num_threads=torch.get_num_threads(),
            parallel=parallel,
            footprint=WeightCount.of((*model.parameters(), *model.buffers())),
        ),
        pools=pools,
        takes_chunks=forward.takes_chunks,
        shares_prefixes=forward.shares_prefixes,
    )


class _OnFirstRank:
    """A forward with the logits on every rank: the first passes them on. See Forward."""

    def __init__(self, forward: PackedModel | StackedModel, parallel: TensorParallel) -> None:
        self._forward = forward
        self._is_first = parallel.rank == 0

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        logits = self._forward(batch, cache)
        return logits if self._is_first else None


_HOW = {
    "packed": "its attention over our blocks, all rows in one forward",
    "stacked": "padded batches, what it keeps of sequences handed to it",
    "alone": "each sequence in a forward of its own",
}


def models_without(no_row: NoRow) -> str:
    """What messages call the models that have no row of the registry."""
    return f"models that run through transformers ({no_row.why})"


def _choose_way(
    model: Any, vocab_size: int, context: int, block_size: int, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> tuple[PackedModel | StackedModel, FallbackPools]:
    """The first way that computes by steps what the model computes at once, and the pools it needs.

    Raises:
        UnsupportedModel: none does.
    """
    rope = DynamicRope.of(model)
    ways: tuple[Way, ...] = (
        lambda model: PackedModel(model, block_size, device, rope),
        lambda model: _stacked(model, device, rope, is_alone=False),
        lambda model: _stacked(model, device, rope, is_alone=True),
    )
    former = model.config._attn_implementation
    failures: list[str] = []
    with torch.inference_mode():
        with translating_errors():
            prompts, expected = expected_logits(model, vocab_size, device)
        for way in ways:
            try:
                with translating_errors("its code fails"):
                    forward = way(model)
                    size = forward.kept.fit_block(block_size, context, dtype)
                    pools = FallbackPools(forward.kept, size, dtype, device, num_ranks)
                    check_steps(forward, pools, prompts, expected)
            except FunitelError as error:
                failures.append(error.message)
            else:
                if failures:
                    logger.info("not computed in a faster way: %s", "; ".join(failures))
                return forward, pools
            model.set_attn_implementation(former)
    raise UnsupportedModel(f"the model cannot be served through transformers: {'; '.join(failures)}")


def _stacked(model: Any, device: torch.device, rope: DynamicRope, *, is_alone: bool) -> StackedModel:
    adapter = choose_adapter(model, device)
    if not adapter.takes_padding and not is_alone:
        raise Unsuited("its code does not say how to pad")
    return StackedModel(model, adapter, device, rope, is_alone=is_alone)


def context_of(config: Any, folder: Path) -> int:
    """Longest sequence in tokens."""
    known = (getattr(config, key, None) for key in _CONTEXT_KEYS)
    found = next((value for value in known if isinstance(value, int) and value > 0), None)
    if found is not None:
        return found
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length")
    except (OSError, ValueError, AttributeError):
        stated = None
    return int(stated) if isinstance(stated, int) and 0 < stated <= _UNBOUNDED_CONTEXT else _UNBOUNDED_CONTEXT
