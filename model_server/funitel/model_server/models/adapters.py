"""The layers of the torch decoder that take adapters."""

import logging
from collections.abc import Iterator
from functools import partial

import torch

from funitel.model_server.adapters.registry import AdapterBase
from funitel.model_server.adapters.sites import base_modules, max_elements
from funitel.model_server.device.probe_or_fall_back import probe_or_fall_back, reason_of
from funitel.model_server.layers.attention import Attention, LatentAttention
from funitel.model_server.layers.linear import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from funitel.model_server.layers.low_rank.ops import LowRankDelta, LowRankStep, TorchLowRankOps
from funitel.model_server.layers.low_rank.weights import place
from funitel.model_server.layers.mlp import Mlp, MlpAndExperts
from funitel.model_server.models.decoder import AnyLayer, Decoder, SingleBlockLayer
from funitel.model_server.models.mixer import AttentionBesideState, Mixer, StateLayer

logger = logging.getLogger(__name__)

Taker = ColumnLinear | RowLinear | VocabEmbedding | VocabHead


def take_adapters(decoder: Decoder, prefix: str, dtype: torch.dtype, device: torch.device) -> AdapterBase:
    """Have a decoder add the adapters of its rows to its layers; `prefix` is that of its tensors' names."""
    takers = list(_takers(decoder))
    sites = [taker.site for taker in takers]
    step = LowRankStep(_ops(device), sites)
    for number, taker in enumerate(takers):
        taker.delta = LowRankDelta(step, number, taker.site)
    decoder.low_rank = step
    return AdapterBase(
        modules=base_modules(sites, prefix),
        place=partial(place, sites, dtype=dtype, device=device),
        max_bytes=lambda rank: max_elements(sites, rank) * dtype.itemsize,
    )


def _ops(device: torch.device) -> TorchLowRankOps:
    """Kernels where a GPU runs them."""
    if device.type != "cuda":
        return TorchLowRankOps()

    def fall_back(error: Exception) -> TorchLowRankOps:
        logger.warning("adapters are computed in torch, without the Triton kernels: %s", reason_of(error))
        return TorchLowRankOps()

    return probe_or_fall_back(partial(_kernels, device), fall_back)


def _kernels(device: torch.device) -> TorchLowRankOps:
    # Triton: seconds to import, and there with torch's builds for GPUs only
    from funitel.model_server.layers.low_rank.kernels import TritonLowRankOps, check_low_rank

    check_low_rank(device)
    return TritonLowRankOps()


def _takers(decoder: Decoder) -> Iterator[Taker]:
    if decoder.token_embedding.embedding is not None and decoder.spec.is_first:
        yield decoder.token_embedding.embedding
    for layer in decoder.layers:
        if isinstance(layer, AnyLayer):
            yield from _of_layer(layer)
    if decoder.head is not None and not decoder.spec.is_head_normalized:
        yield decoder.head


def _of_layer(layer: AnyLayer) -> Iterator[Taker]:
    """What computes every token of a step by its own weights: not experts, which compute some."""
    mixer = layer.mixer if isinstance(layer, SingleBlockLayer) else layer.attention
    if mixer is not None:
        yield from _of_mixer(mixer)
    mlp = layer.mlp.mlp if isinstance(layer.mlp, MlpAndExperts) else layer.mlp
    if isinstance(mlp, Mlp):
        yield mlp.up
        yield mlp.down


def _of_mixer(mixer: Mixer) -> Iterator[Taker]:
    if isinstance(mixer, AttentionBesideState):
        yield from _of_mixer(mixer.attention)
        yield from _of_mixer(mixer.state)
    elif isinstance(mixer, Attention):
        yield mixer.qkv
        yield mixer.out
        if mixer.gate is not None:
            yield mixer.gate
    elif isinstance(mixer, LatentAttention):
        yield mixer.queries.up
        yield mixer.out
    elif isinstance(mixer, StateLayer):
        yield mixer.mixer.inputs
        yield mixer.mixer.out
