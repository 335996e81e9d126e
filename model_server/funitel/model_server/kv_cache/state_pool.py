"""The state pool: what layers without keys and values keep of each running sequence, in a slot of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.kv_cache.zeroed import zeros
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import StateSpec
from funitel.proto.errors import SettingsError


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a slot of this rank holds: for each of `layers` inputs of the convolution, and a matrix for each head."""

    layers: tuple[int, ...]
    conv: tuple[int, int]  # [conv_width - 1, channels]
    matrices: tuple[int, int, int]  # [num_heads, key_dim, value_dim]

    @classmethod
    def of(cls, spec: ModelSpec, size: int, rank: int) -> "StateLayout | None":
        """The layout on a rank of `size`; None where no layer has a state. Raises: see `state_heads`."""
        state = spec.state
        if state is None:
            return None
        heads = state_heads(state, size, rank)
        channels = state.num_channels(heads.num_heads, heads.num_kv_heads)
        key_dim, value_dim = state.matrix
        matrices = (heads.num_heads if key_dim else 0, key_dim, value_dim)
        layers = tuple(layer for layer in spec.state_layers if layer in spec.held_layers)
        return cls(layers, (state.conv_width - 1, channels), matrices)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of a layer: of its convolution, and of its matrices."""
        return int(np.prod(self.conv)), int(np.prod(self.matrices))

    @property
    def num_elements(self) -> int:
        """Elements of a slot; one where no layer with a state is here, as slots are counted all the same."""
        return max(1, len(self.layers) * sum(self.sizes))

    @property
    def bytes_per_slot(self) -> int:
        """Memory of a slot on this rank."""
        return self.num_elements * torch.float32.itemsize


def state_heads(state: StateSpec, size: int, rank: int) -> HeadSplit:
    """The heads of a rank, as `num_heads`, and the groups that they belong to, as `num_kv_heads`.

    Raises:
        SettingsError: more ranks than heads.
    """
    if size > state.num_heads:
        raise SettingsError(f"--num-shard {size} is larger than the {state.num_heads} heads of layers with a state")
    return HeadSplit.of(state.num_heads, state.num_groups, size, rank)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer in all slots, views of the pool."""

    conv: torch.Tensor  # [num_slots, conv_width - 1, channels]
    matrices: torch.Tensor  # [num_slots, num_heads, key_dim, value_dim]


class StatePool:
    """States in float32, a slot after the other, so that a sequence's is one piece of memory.

    Slot 0 is never a sequence's. `layers` are the views of each layer with a state.
    """

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.pool = zeros((num_slots, layout.num_elements), torch.float32, device)
        self.layers: dict[int, LayerStates] = {}
        conv, matrices = layout.sizes
        for place, layer in enumerate(layout.layers):
            begin = place * (conv + matrices)
            parts = self.pool[:, begin : begin + conv], self.pool[:, begin + conv : begin + conv + matrices]
            views = parts[0].view(num_slots, *layout.conv), parts[1].view(num_slots, *layout.matrices)
            self.layers[layer] = LayerStates(views[0], views[1])

    @property
    def num_bytes(self) -> int:
        """Memory of the pool on this rank."""
        return self.pool.numel() * self.pool.element_size()

    def clear(self, slots: Sequence[int]) -> None:
        """Make the states of slots those before the first token."""
        if slots:
            self.pool.index_fill_(0, self._places(slots), 0.0)

    def copy(self, source: int, target: int) -> None:
        """Give slot `target` the state of slot `source`."""
        self.pool[target].copy_(self.pool[source], non_blocking=True)

    def _places(self, slots: Sequence[int]) -> torch.Tensor:
        return upload(np.array(slots, dtype=np.int64), self.pool.device)
