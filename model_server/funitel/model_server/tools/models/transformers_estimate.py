"""What a model that runs through transformers would take, from its configuration and a forward without values."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from funitel.model_server.files.integrity import read_json
from funitel.model_server.loading.transformers import check_honoured, context_of
from funitel.model_server.models.transformers_fallback.cache_adapters import choose_keeper
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.load import hollow, named, read_config, translating_errors
from funitel.model_server.models.transformers_fallback.packed import PackedModel
from funitel.model_server.models.transformers_fallback.pool import CacheLayout
from funitel.model_server.models.transformers_fallback.tensor_parallel import Split
from funitel.model_server.settings import ModelsSettings
from funitel.proto.errors import FunitelError, NoRow

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEstimate:
    """Of one model: elements of the weights of each rank, and what each keeps, None where only loading tells."""

    architecture: str
    num_elements: tuple[int, ...]
    context: int
    kept: CacheLayout | None


def forecast(settings: ModelsSettings, folder: Path, no_row: NoRow) -> TransformersEstimate:
    """What loading the model in `folder` would find.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_config(folder, no_row, trusts_code=settings.trust_remote_code)
    check_honoured({"--quantize": settings.quantize}, no_row.why)
    model = hollow(config, trusts_code=settings.trust_remote_code)
    split = Split.of(model, settings.num_shard) if settings.num_shard > 1 else None
    kept = _kept(model, settings.block_size)
    return TransformersEstimate(
        architecture=named(read_json(folder / "config.json")),
        num_elements=tuple(_num_elements(model, split, rank) for rank in range(settings.num_shard)),
        context=context_of(config.get_text_config(decoder=True), folder),
        kept=kept if split is None or kept is None else split.kept_of(kept),
    )


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
        lambda: choose_keeper(model, _META).kept,
    )
    for probe in probes:
        with suppress(FunitelError), translating_errors():  # code that looks at values has none here
            return probe()
    return None
