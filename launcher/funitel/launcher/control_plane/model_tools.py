"""The model server's tools, as processes of their own: what is cached, what can run a model, whether a spec is one."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from funitel.launcher.control_plane.records import CachedModel
from funitel.launcher.processes.pid_one import output_of
from funitel.proto.errors import Conflict, FunitelError, InvalidRequest, NotFound, NotReady
from funitel.proto.process.python import module_command

MAX_SECONDS = 120.0  # that a tool may take: starting one takes seconds, and on a busy machine many
_REFUSED, _USAGE = 1, 2  # exit codes: an error with a line that says why; a command line that is wrong


class ModelTools:
    """The tools, run with the environment and the cache folder of one server."""

    def __init__(
        self,
        environ: Mapping[str, str],
        cache_dir: str | None = None,
        command: Sequence[str] = module_command("funitel.model_server"),
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._environ = dict(environ)
        self._command = tuple(command)
        self._max_seconds = max_seconds
        self._cache = [] if cache_dir is None else ["--cache-dir", cache_dir]

    async def cached(self) -> list[CachedModel]:
        """The models on the disk of this machine; raises FunitelError."""
        content = json.loads(await self._run("cached", "--json", *self._cache))
        return [CachedModel.from_json(each) for each in content["list"]]

    async def remove_cached(self, model_name: str, *, check: bool) -> list[CachedModel]:
        """Delete a model from the disk, or with `check` say what would go.

        Raises:
            NotFound: there is none of that name.
            Conflict: a process uses it or prepares it.
        """
        found = [each for each in await self.cached() if each.model_name == model_name]
        if not found:
            raise NotFound(f"no model {model_name} is cached")
        flags = ["--check"] if check else []
        try:
            await self._run("remove-cached", "--json", *flags, *self._cache, "--", model_name)
        except FunitelError as error:
            raise Conflict(error.message) from error
        return found

    async def engines(self, model: str, *flags: str) -> dict[str, Any]:
        """Options of a model with reasons, as the tool `models --explain --json` prints them.

        Raises:
            NotFound: there is no such model, it is damaged, or the hub does not tell.
            NotReady: it takes longer than `MAX_SECONDS`, as where the hub does not answer.
            FunitelError: the tool failed.
        """
        content = json.loads(
            await self._run("models", "--explain", "--json", *self._cache, *flags, "--", model, refusal=NotFound)
        )
        if not isinstance(content, dict):
            raise FunitelError(f"the options of {model} cannot be read")
        return content

    async def check_spec(self, spec: Mapping[str, Any], field: str) -> None:
        """Check a model spec; raises InvalidRequest with a message that names the field of the spec."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(dict(spec), file)
            file.flush()
            try:
                await self._run("check-spec", file.name)
            except FunitelError as error:
                reason = error.message.removeprefix(f"{file.name}: ").replace(file.name, "the spec")
                raise InvalidRequest(f"`{field}`: {reason}", field) from error

    async def _run(self, *words: str, refusal: type[FunitelError] = FunitelError) -> str:
        """The output of a tool; raises FunitelError with its reason, and `refusal` where the tool names one."""
        try:
            code, out, err = await output_of((*self._command, *words), self._environ, self._max_seconds)
        except TimeoutError as error:
            raise NotReady(f"funitel-server {words[0]} has not ended within {self._max_seconds:g} s") from error
        except OSError as error:
            raise FunitelError(f"funitel-server {words[0]} cannot be started: {error.strerror}") from error
        if code == 0 or (code == 1 and out.strip() and not err.strip()):
            return out.decode("utf-8", "replace")
        lines = err.decode("utf-8", "replace").strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = errors[-1] if errors else lines[-1] if lines else f"it ended with {code}"
        kind = InvalidRequest if code == _USAGE else refusal if code == _REFUSED and errors else FunitelError
        raise kind(f"funitel-server {words[0]}: {reason}" if not errors else reason)
