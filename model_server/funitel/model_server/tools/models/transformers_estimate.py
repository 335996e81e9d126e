"""Estimate what a model that runs through transformers takes, from its configuration and a forward without values."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.precision import kv_label
from funitel.model_server.loading.common import choose_device, choose_dtype
from funitel.model_server.loading.flags import check_quantize
from funitel.model_server.loading.transformers import context_of, models_without
from funitel.model_server.models.transformers_fallback.cache_adapters import choose_adapter
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.load import hollow, named, read_config, translating_errors
from funitel.model_server.models.transformers_fallback.packed import PackedModel
from funitel.model_server.models.transformers_fallback.pool import CacheLayout, FallbackPools
from funitel.model_server.models.transformers_fallback.tensor_parallel import Split
from funitel.model_server.settings import ModelsSettings
from funitel.model_server.tools.models.needs import Needs, with_memory
from funitel.proto.errors import FunitelError, NoRow

_META = torch.device("meta")


def estimate(settings: ModelsSettings, folder: Path, no_row: NoRow) -> Needs:
    """What each rank of the model in `folder` takes.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_config(folder, no_row, trusts_code=settings.trust_remote_code)
    check_quantize(settings.quantize, folder, models_without(no_row))
    model = hollow(config, trusts_code=settings.trust_remote_code)
    split = Split.of(model, settings.num_shard) if settings.num_shard > 1 else None
    context = context_of(config.get_text_config(decoder=True), folder)
    device = choose_device(settings.device, 0)
    dtype = choose_dtype(settings.dtype, device)
    facts = Needs(
        architecture=named(read_json(folder / "config.json")),
        served_by="transformers, over our blocks",
        why=no_row.why,
        precision=kv_label(dtype),
        kv_precision=kv_label(dtype),
        context=context,
        weights=tuple(_num_elements(model, split, rank) * dtype.itemsize for rank in range(settings.num_shard)),
    )
    kept = _kept(model, settings.block_size)
    if kept is None:  # only loading tells
        return with_memory(facts, settings)
    kept = kept if split is None else split.kept_of(kept)
    size = kept.fit_block(settings.block_size, context, dtype)
    pools = FallbackPools(kept, size, dtype, device, settings.num_shard)
    return with_memory(facts, settings, [pools] * settings.num_shard)


def _num_elements(model: torch.nn.Module, split: Split | None, rank: int) -> int:
    """Elements of parameters and buffers that a rank holds; what several names have in common counts once."""
    tensors = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if split is None:
        return sum(tensor.numel() for _, tensor in tensors.values())
    return sum(split.elements_of(name, tuple(tensor.shape), rank) for name, tensor in tensors.values())


@torch.inference_mode()
def _kept(model: torch.nn.Module, block_size: int) -> CacheLayout | None:
    probes: tuple[Callable[[], CacheLayout], ...] = (
        lambda: PackedModel(model, block_size, _META, DynamicRope()).kept,
        lambda: choose_adapter(model, _META).kept,
    )
    for probe in probes:
        with suppress(FunitelError), translating_errors():  # code that looks at values has none here
            return probe()
    return None
