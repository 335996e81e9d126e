"""A model in parts within one shard: some layers on a GPU and others on the CPU, or each in a precision of its own.

The parts follow one another in every step, and have a pool each with the same blocks. Batches and logits are on the
host, whatever the devices of the parts.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.precision import MADE, Tier, choose_tier
from funitel.model_server.device.stages import Handover
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.hub.resolve import is_outdated
from funitel.model_server.kv_cache.joined_pools import JoinedPools
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.loading.common import Bytes, Loaded, choose_device, choose_dtype
from funitel.model_server.loading.fused_backend import load_fused
from funitel.model_server.loading.torch_backend import load_torch
from funitel.model_server.models.joined import JoinedForward, JoinedPart, join_adapters
from funitel.model_server.quantized.config import check_flag
from funitel.model_server.quantized.select import MADE as MADE_ON_GPU
from funitel.model_server.settings import FLOAT8_KV_DTYPES, ModelServerSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec, uncut
from funitel.proto.errors import SettingsError
from funitel.proto.settings.layer_parts import EXACT, ON_CPU, ON_GPU, LayerParts

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a model, the device that has them, and the settings with the precision of this part."""

    layers: range
    device: torch.device
    settings: ModelServerSettings


def device_of(settings: ModelServerSettings) -> torch.device:
    """The device of a rank, or the GPU of its layers that are on one.

    Raises:
        SettingsError: there is no GPU for layers that shall be on one.
    """
    table, flag = settings.layer_parts, settings.placing
    if table is not None and not table.has(ON_GPU):
        if settings.device == "cuda":
            raise SettingsError(f"--device cuda cannot be used with {flag}, which has no layers on a GPU")
        return HOST
    device = choose_device(settings.device, settings.device_number)
    if flag is not None and device.type != "cuda":
        why = "--device is cpu" if settings.device == "cpu" else "this machine has none that torch can use"
        raise SettingsError(f"{flag} needs a GPU: {why}")
    return device


def parts_of(settings: ModelServerSettings, spec: ModelSpec, device: torch.device) -> list[Part] | None:
    """The parts of a model; None where it is one piece on `device`.

    Raises:
        SettingsError: the model cannot be placed as it is asked for, or not with other settings.
    """
    table, flag = settings.layer_parts, settings.placing
    if settings.gpu_layers is not None:
        cut = spec.num_layers - settings.gpu_layers
        if cut <= 0:
            logger.info("--gpu-layers %d: all %d layers are on the GPU", settings.gpu_layers, spec.num_layers)
            return None
        table = LayerParts(f"0-{cut - 1}={ON_CPU},{cut}-{spec.num_layers - 1}={ON_GPU}")
    if table is None or flag is None:
        return None
    _check_model(spec, table, flag)
    _check_settings(settings, table, flag)
    return [
        Part(each.layers, device if each.place == ON_GPU else HOST, _settings_of(settings, each.place))
        for each in table
    ]


def _check_model(spec: ModelSpec, table: LayerParts, flag: str) -> None:
    if spec.state_layers:
        raise SettingsError(f"{flag} is not for {spec.architecture}, which keeps states of sequences")
    if table.num_layers != spec.num_layers:
        raise SettingsError(f"{flag} places {table.num_layers} layers, the model has {spec.num_layers}")
    for each in table[1:]:
        reason = uncut(spec, each.first)
        if reason is not None:
            raise SettingsError(f"{flag} has a part that begins with layer {each.first}: {reason}")


def _check_settings(settings: ModelServerSettings, table: LayerParts, flag: str) -> None:
    if all(each.place == ON_GPU for each in table):
        raise SettingsError(f"{flag} has all layers on the GPU: leave it out")
    given = {
        "--cpu-offload-gb": f"{settings.cpu_offload_gb:g}" if settings.cpu_offload_gb else None,
        "--kv-host-gb": f"{settings.kv_host_gb:g}" if settings.kv_host_gb else None,
        "--expert-parallel": "" if settings.expert_parallel else None,
    }
    if table.has(ON_GPU):
        given["--kv-disk-gb"] = f"{settings.kv_disk_gb:g}" if settings.kv_disk_gb else None
    if not table.has(ON_GPU) and not table.has(ON_CPU):
        given |= {"--dtype": settings.dtype, "--quantize": settings.quantize}
    for name, value in given.items():
        if value is not None:
            raise SettingsError(f"{' '.join(filter(None, (name, value)))} cannot be used with {flag}")


def _settings_of(settings: ModelServerSettings, place: str) -> ModelServerSettings:
    """The settings of the layers at a place, where `--dtype` and `--quantize` are for those that say no precision."""
    if place == ON_GPU:
        is_float8 = settings.kv_cache_dtype in FLOAT8_KV_DTYPES
        settings = settings if is_float8 else replace(settings, kv_cache_dtype=None)
        return replace(settings, quantize=None) if settings.quantize == "gguf" else settings
    if place == ON_CPU:
        return replace(settings, quantize=None) if settings.quantize == "fp8" else settings
    is_exact = place in EXACT
    return replace(
        settings, dtype=place if is_exact else None, quantize=None if is_exact else place, quantize_tensors=None
    )


def open_weights(
    settings: ModelServerSettings, folder: Path, spec: ModelSpec, device: torch.device
) -> tuple[Weights, Tier | None]:
    """The tensors of a checkpoint for a device, and how the fused step would keep them; None on a GPU.

    Raises:
        StartupError: the checkpoint and the settings do not fit together.
    """
    weights = Weights(folder, choose_dtype(settings.dtype, device), device, spec.names.prefix)
    tier = None
    weights.round_as(settings.quantize, settings.quantize_tensors, spec.names)
    if device.type == "cpu":
        tier = choose_tier(settings.dtype, settings.quantize, weights.quantization, has_blocks=weights.has_blocks)
        if tier is Tier.INT8 and not weights.has_blocks and is_outdated(folder):
            logger.warning("%s was converted by an older version, to float32: name the GGUF as --model-id", folder)
    made = MADE if tier is not None else MADE_ON_GPU if device.type == "cuda" else {}
    if settings.quantize not in made or weights.quantization is not None:
        check_flag(settings.quantize, weights.quantization)
    return weights, tier


def load_parts(folder: Path, spec: ModelSpec, parts: Sequence[Part]) -> Loaded:
    """The parts of a model as one decoder, with their pools.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    link, alone = Handover(), TensorParallel()
    every: list[Loaded] = []
    pools: list[SpecPools] = []
    for part in parts:
        own = StageSpec.of(spec, part.layers)
        weights, tier = open_weights(part.settings, folder, own, part.device)
        loaded = None if tier is None else load_fused(part.settings, own, weights, alone, tier, link=link)
        loaded = loaded or load_torch(part.settings, own, weights, alone, link)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        every.append(loaded)
        pools.append(SpecPools(own, heads, part.settings.block_size, loaded.kv_dtype, part.device))
        logger.info(
            "layers %d..%d of %d device=%s step=%s precision=%s kv_dtype=%s weight_bytes=%d",
            *(part.layers.start, part.layers.stop - 1, spec.num_layers, part.device, loaded.name, loaded.precision),
            *(loaded.kv_precision, loaded.footprint.held_bytes),
        )
    return _joined(parts, every, JoinedPools(tuple(pools)))


def _joined(parts: Sequence[Part], every: Sequence[Loaded], pools: JoinedPools) -> Loaded:
    """Parts that are loaded, as one decoder."""
    sizes = [each.step_bytes for each in every if each.step_bytes is not None]
    fused = [each for each in every if each.name == "fused"]
    takers = [each.adapters for each in every if each.adapters is not None]
    return Loaded(
        name="+".join(dict.fromkeys(each.name for each in every)),
        decoder=JoinedForward([JoinedPart(one.decoder, part.device) for part, one in zip(parts, every, strict=True)]),
        scores=(fused or every)[-1].scores,
        precision=",".join(_placed(part, one) for part, one in zip(parts, every, strict=True)),
        kv_dtype=every[0].kv_dtype,
        num_threads=max(each.num_threads for each in every),
        parallel=TensorParallel(),
        footprint=Bytes.of(*(each.footprint for each in every)),
        step_bytes=(lambda num_tokens: sum(of_part(num_tokens) for of_part in sizes)) if sizes else None,
        adapters=join_adapters(takers) if len(takers) == len(every) else None,
        pools=pools,
        gpu_blocks=pools.gpu_blocks,
    )


def _placed(part: Part, loaded: Loaded) -> str:
    """Where layers are, as `/info` says it: `0-9=cpu:int8`."""
    precision = loaded.precision.removeprefix("torch.")
    return f"{part.layers.start}-{part.layers.stop - 1}={part.device.type}:{precision}"
