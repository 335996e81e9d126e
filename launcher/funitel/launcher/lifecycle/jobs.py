"""What is started for a replica of a model: its settings, its socket, its GPUs, its files."""

import dataclasses
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from funitel.launcher.config.resolve import ResolvedSettings, fit_to_model, resolve, shards_and_gpus
from funitel.launcher.control_plane.model_settings import SERVER_FLAGS
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.lifecycle.server import ServerFacts
from funitel.launcher.settings import LauncherSettings
from funitel.router.settings import RouterSettings

LOCAL = "local"
_ROUTER_FIELDS = {field.name: field.default for field in dataclasses.fields(RouterSettings)}
_DIGITS = 8
_PLAIN_BYTES = 64  # of a name in the name of a file
KEPT_LOGS = 8  # replicas of a model, besides those that run


def label_of(name: str) -> str:
    """A short name of a model for paths."""
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]


def log_of(server: ServerFacts, name: str, what: str) -> Path:
    """The file with the output of a process of a model."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    plain = plain.encode()[:_PLAIN_BYTES].decode(errors="ignore")
    return server.log_folder / f"{plain}-{label_of(name)}-{what}.log"


def remove_old_logs(server: ServerFacts, name: str, next_replica: int) -> None:
    """Remove the output of replicas of a model but for the last ones: each load has replicas with new ids."""
    prefix = log_of(server, name, "").stem
    for path in server.log_folder.glob(f"{prefix}*.log"):
        number = path.stem.removeprefix(prefix).partition("-")[0]
        if number.isdecimal() and int(number) < next_replica - KEPT_LOGS:
            with suppress(OSError):
                path.unlink()


def num_shard_of(server: ServerFacts, settings: LauncherSettings) -> int:
    """Shards of each replica of a model."""
    num_shard, _ = shards_and_gpus(dataclasses.replace(settings, num_replicas=1), server.environ)
    return num_shard


def resolved_of(
    server: ServerFacts, settings: LauncherSettings, name: str, replica: int, folder: Path
) -> ResolvedSettings:
    """The settings of one replica, fitted to the model.

    Raises:
        SettingsError: they do not fit the model or the machine.
    """
    count = settings.num_replicas
    path = str(server.run_folder / f"{label_of(name)}-{replica}")
    alone = dataclasses.replace(settings, num_replicas=1, master_port=None)
    resolved = resolve(alone, num_shard_of(server, settings), path)
    return dataclasses.replace(fit_to_model(resolved, folder), replicas_on_host=count)


def job_of(
    server: ServerFacts,
    settings: LauncherSettings,
    name: str,
    replica: int,
    folder: Path,
    *,
    workers: tuple[str, ...] = (),
    rank_bytes: int = 0,
    gpus: tuple[str, ...] = (),
) -> ReplicaJob:
    """What an executor starts for a replica.

    Args:
        server: what is common to all models.
        settings: of the model.
        name: of the model.
        replica: id.
        folder: of the model.
        workers: place of each rank.
        rank_bytes: memory of each.
        gpus: that it is to use; those of the environment when there are none.

    Raises:
        SettingsError: the settings do not fit the model or the machine.
    """
    environ: dict[str, str] = dict(server.environ)
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return ReplicaJob(
        model=name,
        replica=replica,
        folder=folder,
        settings=resolved_of(server, settings, name, replica, folder),
        environ=environ,
        commands=server.commands,
        log=log_of(server, name, str(replica)),
        outlives=server.outlives,
        workers=workers,
        rank_bytes=rank_bytes,
    )


def router_fields(settings: ResolvedSettings, defaults: LauncherSettings, folder: Path, name: str) -> dict[str, Any]:
    """The fields of the router's settings that this model changes, as JSON.

    Args:
        settings: of a replica.
        defaults: of a model that says nothing.
        folder: of the model.
        name: of the model.
    """
    fields: dict[str, Any] = {
        "tokenizer_name": str(folder),
        "served_model_name": name,
        "max_batch_prefill_tokens": settings.max_batch_prefill_tokens,
    }
    for field in dataclasses.fields(LauncherSettings):
        if field.name in _ROUTER_FIELDS and field.name not in SERVER_FLAGS and field.name not in fields:
            value = getattr(settings, field.name)
            if value != getattr(defaults, field.name) and field.name not in ("revision", "model_id"):
                fields[field.name] = _as_json(value)
    return fields


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def folder_of(router: Mapping[str, Any]) -> Path | None:
    """The folder of a model, by the fields of its entry."""
    name = router.get("tokenizer_name")
    return Path(name) if name else None
