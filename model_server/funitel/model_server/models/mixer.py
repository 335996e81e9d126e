"""The first block of a layer: attention, or what takes its place, or both beside each other."""

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.attention import Attention, LatentAttention, Rotations
from funitel.model_server.layers.elementwise import ElementwiseOps
from funitel.model_server.layers.states.delta_net import DeltaNet
from funitel.model_server.layers.states.lightning import Lightning
from funitel.model_server.layers.states.mamba import Mamba
from funitel.model_server.layers.states.mamba2 import Mamba2
from funitel.model_server.layers.states.short_conv import ShortConv
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import ModelSpec


class StateLayer:
    """What takes the place of attention in a layer that keeps a state."""

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, index: int) -> None:
        self.index = index
        self.mixer: DeltaNet | Mamba2 | Mamba | Lightning | ShortConv
        if spec.delta_net is not None:
            self.mixer = DeltaNet(spec, spec.delta_net, weights, parallel, index)
        elif spec.mamba2 is not None:
            self.mixer = Mamba2(spec, spec.mamba2, weights, parallel, index)
        elif spec.mamba is not None:
            self.mixer = Mamba(spec, spec.mamba, weights, parallel, index)
        elif spec.lightning is not None:
            self.mixer = Lightning(spec, spec.lightning, weights, parallel, index)
        else:
            assert spec.short_conv is not None
            self.mixer = ShortConv(spec, spec.short_conv, weights, parallel, index)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, rotations: Rotations
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out; the states of the rows become those behind the step."""
        assert cache.state_pool is not None
        return self.mixer(x, batch, cache.state_pool.layers[self.index])


class AttentionBesideState:
    """Attention and a layer with a state on the same hidden states; what both give is multiplied and added up."""

    def __init__(self, spec: ModelSpec, attention: Attention | LatentAttention, state: StateLayer) -> None:
        self.attention = attention
        self.state = state
        self.factors = spec.multipliers or MultiplierSpec()

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, rotations: Rotations
    ) -> torch.Tensor:
        """See StateLayer; attention writes to the cache."""
        factors = self.factors
        attended = self.attention(x * factors.attention_in, batch, cache, plan, rotations)
        read = self.state(x * factors.state_in, batch, cache, plan, rotations)
        return attended * factors.attention_out + read * factors.state_out


Mixer = Attention | LatentAttention | StateLayer | AttentionBesideState


def mixer_of(
    spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend, index: int
) -> Mixer:
    """Attention of a layer, or what takes its place."""
    if not spec.attends(index):
        return StateLayer(spec, weights, parallel, index)
    attending: Attention | LatentAttention
    if spec.latent is None:
        attending = Attention(spec, weights, parallel, attention, index)
    else:
        attending = LatentAttention(spec, spec.latent, weights, parallel, attention, index)
    if index not in spec.state_layers:
        return attending
    return AttentionBesideState(spec, attending, StateLayer(spec, weights, parallel, index))


def attending_of(mixer: Mixer) -> Attention | LatentAttention | StateLayer:
    """The attention of a layer that has some, else what takes its place."""
    return mixer.attention if isinstance(mixer, AttentionBesideState) else mixer


def adopt(mixer: Mixer, elementwise: ElementwiseOps) -> None:
    """Let attention compute with these operations, if there is any."""
    attending = attending_of(mixer)
    if isinstance(attending, Attention):
        attending.elementwise = elementwise
