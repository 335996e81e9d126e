"""Command lines and environments of the children.

Every setting travels as a flag, so that `ps` shows what a process runs with; only the API key does not.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from funitel.launcher.config.replica_settings import further_addresses
from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import socket_of
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import DownloadSettings, ModelServerSettings
from funitel.proto.settings.fields import project, to_argv
from funitel.proto.settings.tgi_flags import INERT
from funitel.router.settings import RouterSettings

Environ = Mapping[str, str]

LOADING_SECONDS = 7 * 24 * 3600  # the router may wait so long for shards: the launcher knows whether they come
TOKENS = ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of the hub, the first that is set


@dataclass(frozen=True)
class Commands:
    """The programs the launcher starts, and what it tells them."""

    model_server: tuple[str, ...] = (sys.executable, "-m", "funitel.model_server")
    router: tuple[str, ...] = (sys.executable, "-m", "funitel.router")

    def download(self, settings: LauncherSettings) -> list[str]:
        """Fetch or convert the model; the last line of its stdout is the model's folder."""
        flags = project(settings, DownloadSettings, logger_level=settings.log_level, exit_with_parent=os.getpid())
        return [*self.model_server, "download-weights", flags.model_id, *to_argv(flags, skip=["model_id"])]

    def shard(self, settings: ResolvedSettings, folder: Path, rank: int) -> list[str]:
        """Serve one rank of the model in `folder`."""
        place = settings.places[rank] if settings.places else None
        flags = project(
            settings,
            ModelServerSettings,
            cores=place and place.cores,
            memory_node=place and place.memory_node,
            model_id=str(folder),
            sharded=settings.num_shard > 1,
            rank=rank,
            world_size=settings.num_shard,
            uds_path=settings.shard_uds_path,
            logger_level=settings.log_level,
            exit_with_parent=os.getpid(),
        )
        skip = ["model_id"]
        if settings.otlp_service_name == RouterSettings.otlp_service_name:
            skip.append("otlp_service_name")  # the shards' own default tells them from the router
        return [*self.model_server, "serve", flags.model_id, *to_argv(flags, skip=skip)]

    def route(
        self, settings: ResolvedSettings, folder: Path, listen_fd: tuple[int, ...] = (), ready_fd: int | None = None
    ) -> list[str]:
        """Answer HTTP for the shards, on sockets that listen already; the API key is in its environment."""
        flags = project(
            settings,
            RouterSettings,
            tokenizer_name=str(folder),
            revision=None,
            master_shard_uds_path=socket_of(settings.shard_uds_path, 0),
            replica_address=further_addresses(settings),
            shard_connect_timeout=LOADING_SECONDS,
            shard_return_timeout=LOADING_SECONDS if settings.max_restarts else 0,
            exit_with_parent=os.getpid(),
            listen_fd=listen_fd,
            ready_fd=ready_fd,
        )
        return [*self.router, *to_argv(flags, skip=["api_key"])]


def download_environ(settings: LauncherSettings, environ: Environ) -> dict[str, str]:
    """Environment of the download: the launcher's, without secrets that are not the hub's."""
    inherited = {name: value for name, value in environ.items() if name not in ("API_KEY", "LOG_LEVEL")}
    return _unremarked(inherited) | _hub(settings, environ)


def shard_environ(settings: ResolvedSettings, environ: Environ, rank: int) -> dict[str, str]:
    """Environment of one shard: what torch, NCCL and OpenMP read before any flag is parsed."""
    count = settings.num_threads or settings.most_threads
    threads = {} if count is None else _threads(count)
    return (
        {"OMP_WAIT_POLICY": "PASSIVE"}  # a spinning barrier keeps the core that its last thread waits for
        | download_environ(settings, environ)
        | threads
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(settings.num_shard),
            "MASTER_ADDR": settings.master_addr,
            "MASTER_PORT": str(settings.master_port),
            "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
    )


def router_environ(settings: ResolvedSettings, environ: Environ) -> dict[str, str]:
    """Environment of the router: the launcher's, and the API key."""
    return _unremarked(environ) | _hub(settings, environ) | ({"API_KEY": settings.api_key} if settings.api_key else {})


def _unremarked(environ: Environ) -> dict[str, str]:
    """Leave out variables without effect, which the launcher has remarked on; what shards honour they get as a flag."""
    inert = {row.env for row in INERT}
    return {name: value for name, value in environ.items() if name not in inert}


def _hub(settings: LauncherSettings, environ: Environ) -> dict[str, str]:
    variables = {}
    if settings.huggingface_hub_cache is not None:
        variables = dict.fromkeys(("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"), settings.huggingface_hub_cache)
    token = next((environ[name] for name in TOKENS if environ.get(name)), None)
    return variables | ({} if token is None else {"HF_TOKEN": token})


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
