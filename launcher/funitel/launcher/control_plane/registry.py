"""The registrations of custom models: by type and name, persistent or in memory, with the files that they describe."""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from funitel.launcher.control_plane.records import Registration
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.proto.errors import Conflict, NotFound, StorageFailed

logger = logging.getLogger(__name__)

MAX_BASE = 150  # characters of a file name, which may have 255 bytes with what follows


class Registry:
    """The registrations. A name is registered once, whatever its type."""

    def __init__(self, state: StateThread, folder: Path) -> None:
        """Prepare the registry; `open` reads what is registered.

        Args:
            state: where persistent ones are written.
            folder: for the files that registrations describe.
        """
        self._state = state
        self._folder = folder
        self._all: dict[str, Registration] = {}

    async def open(self) -> None:
        """Read the persistent registrations, and write their files again."""
        for registration in await self._state(StateStore.registrations):
            self._all[registration.name] = registration
            self._write_files(registration)

    def find(self, name: str) -> Registration | None:
        """The registration of a name."""
        return self._all.get(name)

    def of_type(self, type: str) -> list[Registration]:
        """The registrations of a type, by name."""
        return sorted((each for each in self._all.values() if each.type == type), key=lambda each: each.name)

    def all(self) -> list[Registration]:
        """All registrations, by name."""
        return sorted(self._all.values(), key=lambda each: each.name)

    async def add(self, registration: Registration) -> None:
        """Register a model.

        Raises:
            Conflict: the name is registered.
            StorageFailed: it cannot be written; nothing is registered.
        """
        name = registration.name
        if name in self._all:
            raise Conflict(f"{name} is registered already, as {self._all[name].type}: unregister it first")
        self._all[name] = registration  # holds the name while the rest is written
        with ExitStack() as undoing:
            undoing.callback(self._remove_files, registration)
            undoing.callback(self._all.pop, name)
            self._write_files(registration)
            if registration.persist:
                await self._state(StateStore.save_registration, registration)
            undoing.pop_all()

    async def remove(self, type: str, name: str) -> None:
        """Unregister a model; raises NotFound for one that is not registered."""
        registration = self._all.get(name)
        if registration is None or registration.type != type:
            raise NotFound(f"no model {name} of type {type} is registered")
        if registration.persist:
            await self._state(StateStore.forget_registration, type, name)
        del self._all[name]
        self._remove_files(registration)

    def files(self, registration: Registration) -> dict[str, str]:
        """The paths of its files, as flags of `serve`."""
        return {flag: str(path) for flag, (path, _) in self._files(registration).items()}

    def _files(self, registration: Registration) -> Mapping[str, tuple[Path, object]]:
        """Path and content of each file, by the flag that names it."""
        base, found = quote(registration.name, safe=""), {}
        if len(base) > MAX_BASE:
            base = f"{base[:MAX_BASE]}-{hashlib.sha256(registration.name.encode()).hexdigest()[:16]}"
        if registration.spec is not None:
            found["model_spec"] = (self._folder / f"{base}.spec.json", dict(registration.spec))
        if registration.chat_template is not None:
            content = {"chat_template": registration.chat_template}
            found["tokenizer_config_path"] = (self._folder / f"{base}.tokenizer_config.json", content)
        return found

    def _write_files(self, registration: Registration) -> None:
        try:
            for path, content in self._files(registration).values():
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.write_text(json.dumps(content), encoding="utf-8")
        except OSError as error:
            raise StorageFailed(f"{self._folder}: {error.strerror}") from error

    def _remove_files(self, registration: Registration) -> None:
        for path, _ in self._files(registration).values():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("a file of registration %s stays: %s", registration.name, error)
