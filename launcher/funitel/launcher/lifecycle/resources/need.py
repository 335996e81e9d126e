"""How much memory a model will take, before it is loaded; and what would take less."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.lifecycle.resources.budget import shown_bytes
from funitel.launcher.processes.program_output import json_of

logger = logging.getLogger(__name__)

PROCESS_BYTES = 450_000_000  # of a shard beside weights and KV: interpreter, torch, buffers; measured 2026-11
USUAL_TOKENS = 4096  # of KV, beyond which a model's context is not counted
MAX_FACTOR = 2.2  # of the bytes on disk: 16-bit weights that are computed in float32
_GGUF_POINTER = "model.gguf.json"
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one replica: without its KV memory, and of each token of KV where that is known."""

    fixed: int
    per_token: int
    tokens: int

    @property
    def total(self) -> int:
        """Bytes with KV memory for the usual number of tokens."""
        return self.fixed + self.per_token * self.tokens


def most_bytes(folder: Path, num_shard: int) -> int:
    """Bytes of a replica at most, by the size of its files: read at once, and often far too much."""
    return math.ceil(weight_bytes(folder) * MAX_FACTOR) + num_shard * PROCESS_BYTES


def least_bytes(folder: Path, num_shard: int) -> int:
    """Bytes of a replica at least: its weights as they are on the disk."""
    return weight_bytes(folder) + num_shard * PROCESS_BYTES


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    for pattern in _WEIGHTS:
        if files := [path for path in folder.glob(pattern) if path.is_file()]:
            return sum(path.stat().st_size for path in files)
    try:  # a GGUF that lies elsewhere
        parts = json.loads((folder / _GGUF_POINTER).read_bytes())["parts"]
        return sum(int(part["num_bytes"]) for part in parts)
    except (OSError, ValueError, LookupError, TypeError):
        return 0


class Estimator:
    """Asks the model server, in a process of its own, since it imports torch."""

    def __init__(self, commands: Commands, environ: Mapping[str, str]) -> None:
        """Take the command line of the model server, and its environment."""
        self._commands = commands
        self._environ = environ

    async def estimate(self, settings: ResolvedSettings, folder: Path) -> Need | None:
        """The need of a replica, as `funitel models` estimates it; takes seconds. None where it cannot tell."""
        answer = await self._ask(settings, folder)
        weights = answer.get("weights")
        if not isinstance(weights, list) or not weights:
            return None
        blocks, block_size = answer.get("blocks") or [], answer.get("block_size") or 1
        states = sum(answer.get("states") or [])
        fixed = sum(weights) + len(weights) * PROCESS_BYTES + states
        tokens = settings.max_batch_total_tokens or min(answer.get("context") or USUAL_TOKENS, USUAL_TOKENS)
        return Need(fixed, math.ceil(sum(blocks) / block_size), tokens)

    async def advice(self, settings: ResolvedSettings, folder: Path, room: int, replicas: int) -> str:
        """What would fit into `room` bytes instead, as the end of a line; "" where nothing is known to."""
        answer = await self._ask(settings, folder, "--explain")
        options: Sequence[Mapping[str, Any]] = answer.get("options") or ()
        fitting = [each for each in options if each.get("usable") and each.get("bytes") and each["bytes"] <= room]
        if fitting:
            largest = max(fitting, key=lambda each: each["bytes"])
            chosen = [f"{name} {largest[name]}" for name in ("engine", "quantize", "dtype") if largest.get(name)]
            return f"{', '.join(chosen)} would fit, with {shown_bytes(largest['bytes'])}"
        if replicas > 1:
            for count in range(replicas - 1, 0, -1):
                need = await self.estimate(settings, folder)
                if need is not None and need.total * count <= room:
                    return f"replicas {count} would fit, with {shown_bytes(need.total * count)}"
        return await self._smaller(settings, folder, room)

    async def _smaller(self, settings: ResolvedSettings, folder: Path, room: int) -> str:
        """Smaller weights that would fit."""
        for quantize in ("int8", "q4"):
            if settings.quantize is None:
                need = await self.estimate(replace(settings, quantize=quantize), folder)
                if need is not None and need.total <= room:
                    return f"quantize {quantize} would fit, with {shown_bytes(need.total)}"
        return ""

    async def _ask(self, settings: ResolvedSettings, folder: Path, *more: str) -> Mapping[str, Any]:
        """The JSON that `funitel models` prints of a model; empty where it fails."""
        flags = ["--num-shard", str(settings.num_shard), "--device", settings.device]
        for flag, value in (("--dtype", settings.dtype), ("--quantize", settings.quantize)):
            flags += [flag, value] if value is not None else []
        argv = [*self._commands.model_server, "models", str(folder), "--json", *more, *flags]
        answer, error = await json_of(argv, download_environ(settings, self._environ))
        if answer is None:
            logger.debug("no estimate of %s: %s", folder, error)
            return {}
        return answer
