"""The adapters of a shard: loaded and dropped by id, aside from the steps. Rows hold the adapters that they use."""

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from funitel.model_server.adapters.peft_folder import AdapterTensors, BaseModules, read_adapter
from funitel.model_server.device.memory import MEMORY_ERRORS, is_out_of_memory
from funitel.proto.errors import InvalidRequest, ResourceExhausted, WeightsError


class AdapterWeights(Protocol):
    """An adapter's weights as what computes has them."""

    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PlacedAdapter:
    """A loaded adapter. Its memory is free when neither the registry nor a row holds it."""

    id: str
    path: str
    max_rank: int
    weights: AdapterWeights


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What takes the adapters of a model.

    Attributes:
        modules: matrices that take adapters.
        place: makes of an adapter's tensors this rank's weights.
        max_bytes: of the weights of an adapter of a rank, without what it saves whole.
    """

    modules: BaseModules
    place: Callable[[AdapterTensors], AdapterWeights]
    max_bytes: Callable[[int], int]

    def within(self, modules: BaseModules) -> "AdapterBase":
        """The same for adapters of a whole model with these modules, of which it keeps what is for its own."""
        own = self.modules.shapes

        def place(adapter: AdapterTensors) -> AdapterWeights:
            low_ranks = {name: each for name, each in adapter.low_ranks.items() if name in own}
            return self.place(AdapterTensors(low_ranks, {n: each for n, each in adapter.saved.items() if n in own}))

        return replace(self, modules=modules, place=place)


class LoadedAdapters:
    """Adapters by id. Every method may be called from any thread; a step sees an adapter whole or not at all.

    Args:
        base: what takes them; None where the model takes none, for `reason`.
        max_rank: limit of ranks; 0: no adapter is taken.
    """

    def __init__(self, base: AdapterBase | None, max_rank: int, reason: str = "") -> None:
        self.max_rank = 0 if base is None else max_rank
        self._base = base
        self._reason = reason if max_rank else "--max-lora-rank is 0"
        self._adapters: dict[str, PlacedAdapter] = {}
        self._left: WeakValueDictionary[str, PlacedAdapter] = WeakValueDictionary()  # of an earlier router, in rows
        self._loading = threading.Lock()

    def load(self, adapter_id: str, path: str, is_used: Callable[[PlacedAdapter], bool]) -> PlacedAdapter:
        """Read the adapter in the folder `path`; one that is loaded from there already is returned as it is.

        Raises:
            InvalidRequest: it cannot be used, or its id is another's, of which `is_used`; nothing has changed.
            ResourceExhausted: there is no memory for it; nothing has changed.
        """
        base = self._base
        if base is None or not self.max_rank:
            raise InvalidRequest(f"adapter {adapter_id} cannot be loaded: {self._reason}")
        if not adapter_id:
            raise InvalidRequest("id of an adapter must not be empty")
        with self._loading:
            known = self._adapters.get(adapter_id)
            if known is not None and known.path == path:
                return known
            left = self._left.pop(adapter_id, None)
            if known is None and left is not None and left.path == path:
                self._adapters[adapter_id] = left
                return left
            if known is not None and is_used(known):
                raise InvalidRequest(
                    f"adapter {adapter_id} is in use from {known.path}: unload it before {path} is loaded"
                )
            try:
                tensors = read_adapter(Path(path), base.modules, self.max_rank)
                loaded = PlacedAdapter(adapter_id, path, tensors.max_rank, base.place(tensors))
            except (InvalidRequest, WeightsError) as error:
                raise InvalidRequest(f"adapter {adapter_id} cannot be loaded: {error.message}") from error
            except MEMORY_ERRORS as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold its tensors
                raise ResourceExhausted(
                    f"adapter {adapter_id} cannot be loaded: there is no memory for the weights of {path}"
                ) from None
            self._adapters[adapter_id] = loaded
        return loaded

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter; rows that hold it keep it.

        Raises:
            InvalidRequest: there is none of this id.
        """
        if self._adapters.pop(adapter_id, None) is None:
            raise InvalidRequest(f"adapter {adapter_id} is not loaded")

    def clear(self) -> None:
        """Forget all adapters."""
        self._adapters.clear()
        self._left.clear()

    def leave(self) -> None:
        """Forget all adapters for a router that knows of none; those that rows hold are not read again by `load`."""
        self._left.update(dict(self._adapters))  # another thread may load one meanwhile
        self._adapters.clear()

    def get(self, adapter_id: str) -> PlacedAdapter:
        """The adapter of this id.

        Raises:
            InvalidRequest: there is none.
        """
        found = self._adapters.get(adapter_id)
        if found is None:
            why = "is not loaded" if self.max_rank else f"is not loaded: {self._reason}"
            raise InvalidRequest(f"adapter_id {adapter_id} {why}", "adapter_id")
        return found
