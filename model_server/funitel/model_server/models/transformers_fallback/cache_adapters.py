"""What a transformers model keeps of sequences, between our blocks and the form in which its code takes it.

Most take a `Cache` of a layer each: attention layers read and write blocks as they go, states are copied in and out.
RWKV takes a list of tensors.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer

from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.kv_cache.pool import Slots
from funitel.model_server.models.transformers_fallback.pool import AttentionSize, CacheLayout, FallbackPool, StateSize
from funitel.proto.errors import Unsuited


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Rows of a forward, and where what is kept of them lies. `width` is the longest context, in tokens."""

    has_past: bool  # all of them have, or none
    width: int
    input_ids: torch.Tensor  # [rows, tokens]
    positions: torch.Tensor  # [rows, tokens]
    mask: torch.Tensor | None  # [rows, width]: 1 where there is a token; None where none is missing
    written: Slots  # of the tokens, each [rows * tokens]
    read: Slots  # of the contexts, each [rows, width]; where the mask is 0 any slot of the row
    first_blocks: torch.Tensor  # [rows]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return self.input_ids.shape[1]

    @classmethod
    def of(cls, rows: Sequence[RowSpan], block_size: int, device: torch.device) -> "StackedRows":
        """Lay out rows of equally many tokens, all at a start of 0 or none."""
        width = max(row.end for row in rows)
        ends = np.array([row.end for row in rows])[:, None]
        num_tokens = len(rows[0].tokens)
        places = np.arange(width) - (width - ends)  # [rows, width]: positions, negative before the first token
        tables = [row.block_table for row in rows]

        def slots(positions: np.ndarray) -> Slots:
            blocks = np.stack([table[own // block_size] for table, own in zip(tables, positions, strict=True)])
            return tensor(blocks), tensor(positions % block_size)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        blocks, offsets = slots(places[:, width - num_tokens :])
        return cls(
            has_past=rows[0].start > 0,
            width=width,
            input_ids=tensor(np.array([row.tokens for row in rows])),
            positions=tensor(places[:, width - num_tokens :]),
            mask=None if (places[:, 0] == 0).all() else tensor(places >= 0),
            written=(blocks.flatten(), offsets.flatten()),
            read=slots(np.maximum(places, 0)),
            first_blocks=tensor(np.array([table[0] for table in tables])),
        )


_LAYERS_OF_NOTHING = tuple(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name))  # 5.23
_PROBE_TOKENS = 3


class CacheAdapter(Protocol):
    """Hands a model what it keeps of some rows. `takes_padding`: rows of unequal length can be one batch."""

    kept: CacheLayout
    takes_padding: bool

    def give(self, rows: StackedRows, pool: FallbackPool) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""

    def take(self, rows: StackedRows, pool: FallbackPool, given: Mapping[str, Any], output: Any) -> None:
        """Put the states that a forward left where they lie."""


def choose_adapter(model: Any, device: torch.device) -> CacheAdapter:
    """How `model` takes what it keeps, found by a forward of a few tokens.

    Raises:
        Unsuited: in a way that is not known.
    """
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in ("past_key_values", "cache_params") if name in parameters), None)
    if name is not None:
        has_positions, has_mask = "position_ids" in parameters, "attention_mask" in parameters
        return TransformersCacheAdapter(model, name, has_positions, has_mask, device)
    if "state" in parameters:
        return StateListAdapter(model, device)
    raise Unsuited("its code takes no cache that is known here")


class TransformersCacheAdapter:
    """For models that take transformers' `Cache` by the keyword `name`."""

    def __init__(self, model: Any, name: str, has_positions: bool, has_mask: bool, device: torch.device) -> None:
        self._name = name
        self._has_positions = has_positions
        self._config = model.config
        probe = DynamicCache(config=model.config)
        ids = torch.arange(_PROBE_TOKENS, device=device)[None]
        model(input_ids=ids, use_cache=True, **{name: probe})
        self._kinds = [type(layer) for layer in probe.layers]
        self._attending = [i for i, layer in enumerate(probe.layers) if getattr(layer, "keys", None) is not None]
        self._linear = [i for i, kind in enumerate(self._kinds) if issubclass(kind, LinearAttentionLayer)]
        known = (DynamicLayer, LinearAttentionLayer, *_LAYERS_OF_NOTHING)
        unknown = next((kind for kind in self._kinds if not issubclass(kind, known)), None)
        if unknown is not None:
            raise Unsuited(f"its code keeps layers of the kind {unknown.__name__}, which is not known here")
        sizes = [_attention_size(probe.layers[i]) for i in self._attending]
        self._states = [(i, *place) for i in self._linear for place in _state_places(probe.layers[i])]
        states = [getattr(probe.layers[i], kind)[index] for i, kind, index in self._states]
        self.kept = CacheLayout(tuple(sizes), tuple(StateSize(tuple(s.shape[1:]), s.dtype) for s in states))
        self._has_mask = has_mask and bool(sizes)
        self.takes_padding = not sizes or (has_positions and has_mask)

    def give(self, rows: StackedRows, pool: FallbackPool) -> dict[str, Any]:
        """See CacheAdapter."""
        cache = DynamicCache(config=self._config)
        while len(cache.layers) < len(self._kinds):  # without a known configuration layers come as they are used
            cache.layers.append(self._kinds[len(cache.layers)]())
        for at, i in enumerate(self._attending):
            paged = PagedStateLayer if i in self._linear else PagedLayer
            cache.layers[i] = paged(cache.layers[i], rows, pool.keys[at], pool.values[at])
        if rows.has_past:
            for (i, kind, index), states in zip(self._states, pool.states, strict=True):
                _put(cache.layers[i], kind, index, states[rows.first_blocks])
        given: dict[str, Any] = {self._name: cache}
        if self._has_positions:
            given["position_ids"] = rows.positions
        if self._has_mask and rows.mask is not None:
            given["attention_mask"] = rows.mask
        return given

    def take(self, rows: StackedRows, pool: FallbackPool, given: Mapping[str, Any], output: Any) -> None:
        """See CacheAdapter."""
        layers = given[self._name].layers
        for (i, kind, index), states in zip(self._states, pool.states, strict=True):
            states[rows.first_blocks] = getattr(layers[i], kind)[index]


def _attention_size(layer: Any) -> AttentionSize:
    return AttentionSize(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])


def _state_places(layer: LinearAttentionLayer) -> Sequence[tuple[str, int]]:
    """Where a layer that has been used keeps its states: attribute and index."""
    kinds = ("conv_states", "recurrent_states")
    return [(kind, i) for kind in kinds for i, state in getattr(layer, kind).items() if state is not None]


def _put(layer: Any, kind: str, index: int, state: torch.Tensor) -> None:
    """Give a fresh layer a state, as if it had been left by the tokens before."""
    getattr(layer, kind)[index] = state
    getattr(layer, f"is_{kind}_initialized")[index] = True
    layer.has_previous_state[index] = True
    layer.device, layer.dtype = state.device, state.dtype
    if kind == "conv_states":
        layer.conv_kernel_size[index] = state.shape[-1]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """An attention layer of a `Cache` with keys and values in blocks."""

    is_compileable = False
    is_sliding = False

    def __init__(self, former: Any, rows: StackedRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows
        self._pool = keys, values
        self.is_sliding = getattr(former, "is_sliding", False)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, num_kv_heads, tokens, dim]; return those of the whole contexts."""
        found = []
        for pool, new in zip(self._pool, (key_states, value_states), strict=True):
            pool.index_put_(self._rows.written, new.transpose(1, 2).flatten(0, 1).to(pool.dtype))
            found.append(pool[self._rows.read].transpose(1, 2).to(new.dtype))  # [rows, num_kv_heads, width, dim]
        return found[0], found[1]

    def get_seq_length(self) -> int:
        """Tokens before those of this forward, padding included."""
        return self._rows.width - self._rows.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return, and the place of the first."""
        return self._rows.width, 0

    def get_max_length(self) -> int:
        """There is none."""
        return -1


class PagedStateLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer that attends and keeps a state."""

    def __init__(self, former: Any, rows: StackedRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        PagedLayer.__init__(self, former, rows, keys, values)
        LinearAttentionLayer.__init__(self, number_of_states=former.number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of states only: keys and values need none."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class StateListAdapter:
    """For RWKV: a list of tensors [rows, ...], which a forward changes and returns."""

    takes_padding = True

    def __init__(self, model: Any, device: torch.device) -> None:
        ids = torch.arange(_PROBE_TOKENS, device=device)[None]
        state = model(input_ids=ids, use_cache=True).state
        if not isinstance(state, list) or not state:
            raise Unsuited("its code keeps a state that is not known here")
        self.kept = CacheLayout((), tuple(StateSize(tuple(part.shape[1:]), part.dtype) for part in state))

    def give(self, rows: StackedRows, pool: FallbackPool) -> dict[str, Any]:
        """See CacheAdapter."""
        return {"state": [states[rows.first_blocks] for states in pool.states]} if rows.has_past else {}

    def take(self, rows: StackedRows, pool: FallbackPool, given: Mapping[str, Any], output: Any) -> None:
        """See CacheAdapter."""
        for states, new in zip(pool.states, output.state, strict=True):
            states[rows.first_blocks] = new
