"""The adapters that are known by name: listed at start, or loaded at run time. Event loop only.

It says which adapter a request means. Where their weights are is the engine's to decide.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from funitel.proto.errors import FunitelError, InvalidRequest, ModelNotFound, StartupError
from funitel.proto.settings.adapter_list import AdapterSource, name_problem
from funitel.router.adapters.folder import PATH, AdapterFolder, check_root, inspect, locate, locate_below
from funitel.router.core.request import Adapter
from funitel.router.settings import RouterSettings

logger = logging.getLogger(__name__)

NAME = "lora_name"
MAX_REMOVED = 1000  # names remembered


class AdapterEngine(Protocol):
    """What computes with adapters."""

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded."""

    async def load_adapter(self, adapter: Adapter, *, is_pinned: bool = False) -> None:
        """Load an adapter on every replica; a pinned one is never evicted."""

    def retire_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter once no request uses it or waits for it."""


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter that requests can name."""

    adapter: Adapter
    base: str | None  # that its config names
    is_pinned: bool = False


class AdapterRegistry:
    """The known adapters of a router.

    Args:
        settings: the router's.
        base_names: what clients call the model itself.
    """

    def __init__(self, settings: RouterSettings, base_names: Collection[str]) -> None:
        self._settings = settings
        self._base_names = frozenset(base_names)
        self._known: dict[str, KnownAdapter] = {}
        self._changing: set[str] = set()  # names that are being loaded
        self._pinning: set[str] = set()  # those of them that will be pinned
        self._removed: OrderedDict[str, None] = OrderedDict()  # names of adapters that are gone

    @property
    def known(self) -> list[KnownAdapter]:
        """The adapters that requests can name, in the order they came."""
        return list(self._known.values())

    def get(self, name: str) -> KnownAdapter | None:
        """Return the adapter of a name."""
        return self._known.get(name)

    def named_by_model(self, model: str | None) -> Adapter | None:
        """Return the adapter that the `model` of a request names; None where it names none, which means the model.

        Raises:
            ModelNotFound: it names an adapter that was unloaded.
        """
        found = None if model is None else self._known.get(model)
        if found is None and model in self._removed:
            raise ModelNotFound(f"the adapter {model!r} was unloaded")
        return None if found is None else found.adapter

    # Changing -------------------------------------------------------------------------------------------------------

    async def locate_listed(self) -> list[tuple[AdapterSource, Path]]:
        """Find the folders of the adapters that the settings list; fetches those of the hub.

        Raises:
            StartupError: one is not there or has a name of the model, or the folder for others is not there.
        """
        await asyncio.to_thread(check_root, self._settings.lora_folder)
        listed = self._settings.lora_adapters or ()
        for source in listed:
            if source.name in self._base_names:
                raise StartupError(f"--lora-adapters {source}: {source.name!r} is a name of the model itself")
        return [(source, await asyncio.to_thread(locate, source)) for source in listed]

    async def load_listed(self, engine: AdapterEngine, located: Collection[tuple[AdapterSource, Path]]) -> None:
        """Load the adapters that the settings list, each once, so that none fails later; the first stay in memory.

        Raises:
            StartupError: one cannot be served.
        """
        if located and not engine.takes_adapters:
            raise StartupError("--lora-adapters: the shards of this model take no adapters")
        found: list[KnownAdapter] = []
        for source, path in reversed(list(located)):
            try:
                folder = await asyncio.to_thread(inspect, source.name, path)
                await engine.load_adapter(folder.adapter)
            except FunitelError as error:
                raise StartupError(f"--lora-adapters {source}: {error.message}") from error
            found.append(KnownAdapter(folder.adapter, folder.base))
        self._known = {known.adapter.name: known for known in reversed(found)}

    async def load(
        self, engine: AdapterEngine, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False
    ) -> None:
        """Load an adapter at run time; one of the same name is replaced if it may be, and its requests go on with it.

        Raises:
            InvalidRequest: the name or the path may not be, or the adapter cannot be served; nothing has changed.
            FunitelError: loading it failed; nothing has changed.
        """
        if not engine.takes_adapters:
            raise InvalidRequest("the shards of this model take no adapters")
        path_found = await asyncio.to_thread(locate_below, self._settings.lora_folder, path)
        old = self._known.get(name)
        self._check_name(name, is_known=old is not None and not in_place)
        with self._changed(name):
            folder: AdapterFolder = await asyncio.to_thread(inspect, name, path_found)
            with self._pinned(name) if is_pinned else nullcontext():
                try:
                    await engine.load_adapter(folder.adapter, is_pinned=is_pinned)
                except InvalidRequest as error:
                    raise InvalidRequest(error.message, PATH) from error
            self._known[name] = KnownAdapter(folder.adapter, folder.base, is_pinned)
            self._removed.pop(name, None)
            if old is not None and old.adapter.id != folder.adapter.id:
                engine.retire_adapter(old.adapter)

    def unload(self, engine: AdapterEngine, name: str) -> None:
        """Forget an adapter; its requests go on, and its memory is free once the last of them has ended.

        Raises:
            InvalidRequest: adapters do not change at run time, the name is empty, or it is being loaded.
            ModelNotFound: there is none of the name.
        """
        if self._settings.lora_folder is None:
            raise InvalidRequest("adapters can be unloaded at run time with --lora-folder only, which is not given")
        if not name:
            raise InvalidRequest("`lora_name` cannot be empty", NAME)
        known = self._known.get(name)
        if known is None:
            raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
        with self._changed(name):
            del self._known[name]
        self._removed[name] = None
        if len(self._removed) > MAX_REMOVED:
            self._removed.popitem(last=False)
        engine.retire_adapter(known.adapter)

    def _check_name(self, name: str, *, is_known: bool) -> None:
        problem = name_problem(name)
        if problem is not None:
            raise InvalidRequest(f"`lora_name` {problem}. Given: {name[:50]!r}", NAME)
        if name in self._base_names:
            raise InvalidRequest(f"`lora_name` must not be a name of the model itself. Given: {name!r}", NAME)
        if is_known:
            raise InvalidRequest(f"The lora adapter '{name}' has already been loaded.", NAME)

    @contextmanager
    def _pinned(self, name: str) -> Iterator[None]:
        """Count a name as pinned while it is being loaded; one place at least must be left for others."""
        known = {known.adapter.name for known in self._known.values() if known.is_pinned}
        count = len((known | self._pinning) - {name})
        if count >= self._settings.max_loras - 1:
            words = f"`pinned` adapters must be fewer than --max-loras {self._settings.max_loras}"
            raise InvalidRequest(f"{words}. Given: {count + 1}", "pinned")
        self._pinning.add(name)
        try:
            yield
        finally:
            self._pinning.discard(name)

    @contextmanager
    def _changed(self, name: str) -> Iterator[None]:
        """Refuse two changes of one name at once."""
        if name in self._changing:
            raise InvalidRequest(f"The lora adapter '{name}' is being loaded.", NAME)
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)
