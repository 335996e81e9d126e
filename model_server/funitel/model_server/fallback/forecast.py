"""What a model that runs through transformers would take, from its configuration and a forward without values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from funitel.model_server.checkpoint import read_json
from funitel.model_server.fallback.keepers import choose_keeper
from funitel.model_server.fallback.loading import check_honoured, context_of
from funitel.model_server.fallback.model import first_line, named, read_config
from funitel.model_server.fallback.packed import PackedModel
from funitel.model_server.fallback.pool import Kept
from funitel.model_server.fallback.turns import Turns
from funitel.model_server.settings import ModelsSettings
from funitel.proto.errors import NoRow, UnsupportedModel

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one model. `kept` is None where only loading tells."""

    architecture: str
    num_elements: int
    context: int
    kept: Kept | None


def forecast(settings: ModelsSettings, folder: Path, no_row: NoRow) -> Forecast:
    """What loading the model in `folder` would find.

    Raises:
        StartupError: it cannot be served, or not with these settings.
    """
    config = read_config(folder, no_row, trusts_code=settings.trust_remote_code)
    check_honoured(settings.num_shard, settings.quantize, None, None, no_row.why)
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code).eval()
    except Exception as error:  # the code is not ours
        raise UnsupportedModel(f"the model's code in transformers fails: {first_line(error)}") from error
    tensors = (*model.parameters(), *model.buffers())
    return Forecast(
        architecture=named(read_json(folder / "config.json")),
        num_elements=sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in tensors}.values()),
        context=context_of(config.get_text_config(decoder=True), folder),
        kept=_kept(model, settings.block_size),
    )


@torch.inference_mode()
def _kept(model: torch.nn.Module, block_size: int) -> Kept | None:
    probes: tuple[Callable[[], Kept], ...] = (
        lambda: PackedModel(model, block_size, _META, Turns()).kept,
        lambda: choose_keeper(model, _META).kept,
    )
    for probe in probes:
        try:
            return probe()
        except Exception:  # code that looks at values has none here
            continue
    return None
