"""Estimate what serving a decoder in parts takes: each part as a pipeline stage on its device."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from funitel.model_server.kv_cache.joined_pools import JoinedPools
from funitel.model_server.kv_cache.pool import Pools, SpecPools
from funitel.model_server.loading.parts import Part, device_of, parts_of
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec
from funitel.model_server.tools.models.decoder_estimate import estimate_alone
from funitel.model_server.tools.models.needs import Needs, PartNeeds


def parts_for(settings: ModelsSettings, spec: ModelSpec) -> list[Part] | None:
    """The parts that a shard would make of a model; None where it is one piece. Raises: `StartupError`."""
    served = ModelServerSettings(
        model_id=settings.model_id,
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        gpu_layers=settings.gpu_layers,
        layer_parts=settings.layer_parts,
    )
    return None if served.placing is None else parts_of(served, spec, device_of(served))


def estimate_parts(
    settings: ModelsSettings, folder: Path, spec: ModelSpec, parts: Sequence[Part]
) -> tuple[Needs, Sequence[Pools]]:
    """What the parts of a decoder take together, and their pools. Raises: `StartupError`."""
    every: list[PartNeeds] = []
    facts: list[Needs] = []
    joined: list[SpecPools] = []
    for part in parts:
        own = replace(
            settings,
            device=part.device.type,
            dtype=part.settings.dtype,
            quantize=part.settings.quantize,
            gpu_layers=None,
            layer_parts=None,
        )
        found, pools = estimate_alone(own, folder, StageSpec.of(spec, part.layers))
        facts.append(found)
        joined += [each for each in pools if isinstance(each, SpecPools)]
        every.append(
            PartNeeds(
                layers=f"{part.layers.start}-{part.layers.stop - 1}",
                device=part.device.type,
                precision=found.precision,
                weights=sum(found.weights),
                block=joined[-1].bytes_per_block,
            )
        )
    needs = replace(
        facts[0],
        served_by=" and ".join(dict.fromkeys(each.served_by for each in facts)),
        why="; ".join(dict.fromkeys(each.why for each in facts if each.why)),
        precision=" and ".join(dict.fromkeys(each.precision for each in facts)),
        kv_precision=" and ".join(dict.fromkeys(each.kv_precision for each in facts)),
        weights=(sum(each.weights for each in every),),
        parts=tuple(every),
    )
    return needs, [JoinedPools(tuple(joined))]
