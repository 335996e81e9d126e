"""The share of a model that a pipeline stage has: its layers, and what all stages must know of each other's."""

import json
import logging
from dataclasses import replace

import torch

from funitel.model_server.adapters.peft_folder import BaseModules
from funitel.model_server.device.stages import Stage
from funitel.model_server.device.tensor_parallel import TensorParallel, split_evenly
from funitel.model_server.loading.common import Loaded, check_master
from funitel.model_server.models.weight_offload import host_memory_flags
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec, stages_of, with_experts
from funitel.proto.errors import SettingsError
from funitel.proto.settings.partition import Partition

logger = logging.getLogger(__name__)


def part_of(settings: ModelServerSettings, spec: ModelSpec) -> ModelSpec:
    """The spec of this rank's share of a model: of its layers where there are pipeline stages.

    Raises:
        SettingsError: the model cannot be parted as it is asked for.
    """
    if settings.expert_parallel and spec.experts is None:
        raise SettingsError(f"--expert-parallel is for mixtures of experts, {spec.architecture} has no experts")
    if settings.expert_parallel and spec.experts is not None:
        num_experts, size = spec.experts.num_experts, settings.num_tensor_ranks
        if num_experts < size:
            raise SettingsError(f"--expert-parallel: {size} ranks are more than the model's {num_experts} experts")
        spec = with_experts(spec, range(*split_evenly(num_experts, size, settings.tensor_rank)))
    stages = settings.stages
    if stages is None:
        return spec
    if settings.draft_model is not None:
        raise SettingsError(
            f"--draft-model {settings.draft_model} cannot be used with the stages of --partition {stages}"
        )
    for flag, value in host_memory_flags(settings).items():
        if value:
            raise SettingsError(f"{flag} {value:g} cannot be used with the stages of --partition {stages}")
    try:
        layers = stages_of(spec, len(stages), settings.layers)
    except ValueError as error:
        flag = f"--partition {stages}" if settings.layers is None else f"--layers {settings.layers}"
        raise SettingsError(f"{flag} {error}") from error
    index = stages.stage_of(settings.rank)
    mine = layers[index]
    message = "pipeline stage %d of %d: layers %d..%d of %d, ranks of the stage: %d"
    logger.info(message, index, len(stages), mine.start, mine.stop - 1, spec.num_layers, len(stages[index]))
    return StageSpec.of(spec, mine)


def join_stages(settings: ModelServerSettings, stages: Partition, device: torch.device) -> Stage:
    """Wait for the other ranks of all pipeline stages."""
    check_master(settings)
    return Stage.join(stages, settings.rank, settings.master_addr, settings.master_port, device)


def in_stage(loaded: Loaded, stage: Stage) -> Loaded:
    """A decoder of a pipeline stage; adapters are checked against the modules of all stages."""
    adapters = loaded.adapters
    every = _every_modules(stage.whole, None if adapters is None else adapters.modules)
    adapters = None if adapters is None or every is None else adapters.within(every)
    return replace(loaded, stage=stage, adapters=adapters)


def _every_modules(whole: TensorParallel, mine: BaseModules | None) -> BaseModules | None:
    """The modules of all stages; None where one takes no adapters."""
    told = "" if mine is None else json.dumps([dict(mine.shapes), sorted(mine.tables), sorted(mine.heads)])
    texts = whole.exchange(told)
    if mine is None or not all(texts):
        return None
    found = [json.loads(text) for text in texts]
    shapes = {name: (outputs, inputs) for each, _, _ in found for name, (outputs, inputs) in each.items()}
    tables = frozenset(name for _, each, _ in found for name in each)
    heads = frozenset(name for _, _, each in found for name in each)
    return BaseModules(shapes, tables, heads, mine.prefix)
