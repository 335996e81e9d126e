"""Build command lines and environments of the child processes: download, shards, router.

Every setting is passed as a flag, so `ps` shows it. The API key is the exception.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from funitel.launcher.config.replica_settings import further_addresses
from funitel.launcher.config.resolve import ResolvedSettings, prefill_tokens
from funitel.launcher.config.sockets import socket_of
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import DownloadSettings, ModelServerSettings
from funitel.proto.process.python import module_command
from funitel.proto.settings.fields import project, to_argv
from funitel.proto.settings.tgi_flags import INERT
from funitel.router.settings import RouterSettings

Environ = Mapping[str, str]

LOADING_SECONDS = 7 * 24 * 3600  # timeout of the router for shards; the launcher itself notices shards that end
TOKENS = ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # hub tokens; the first that is set is used
API_KEYS = ("FUNITEL_API_KEY", "API_KEY")


@dataclass(frozen=True)
class Commands:
    """The programs that the launcher starts, and their command lines."""

    model_server: tuple[str, ...] = module_command("funitel.model_server")
    router: tuple[str, ...] = module_command("funitel.router")
    keeper: tuple[str, ...] = module_command("funitel.launcher.keeper")

    def download(self, settings: LauncherSettings, *, reports_progress: bool = False) -> list[str]:
        """Command that fetches or converts the model; the last line of its stdout is the model's folder."""
        flags = project(
            settings,
            DownloadSettings,
            logger_level=settings.log_level,
            reports_progress=reports_progress,
            exit_with_parent=os.getpid(),
        )
        return [*self.model_server, "download-weights", flags.model_id, *to_argv(flags, skip=["model_id"])]

    def shard(
        self,
        settings: ResolvedSettings,
        folder: Path | None,
        rank: int,
        folder_fd: int | None = None,
        *,
        outlives: bool = False,
        deployment_file: str | None = None,
    ) -> list[str]:
        """Command that serves one rank of the model in `folder`; None where it will be told through `folder_fd`.

        The rank ends with this process, unless it `outlives` it, or another one adopts it by the `deployment_file`.
        """
        placement = settings.core_assignments[rank] if settings.core_assignments else None
        flags = project(
            settings,
            ModelServerSettings,
            cores=placement and placement.cores,
            memory_node=placement and placement.memory_node,
            model_id=settings.model_id if folder is None else str(folder),
            folder_fd=folder_fd,
            sharded=settings.num_shard > 1,
            rank=rank,
            world_size=settings.num_shard,
            uds_path=settings.shard_uds_path,
            reserved_loras=settings.max_loras if settings.lora_adapters or settings.lora_folder else 0,
            logger_level=settings.log_level,
            exit_with_parent=None if outlives else os.getpid(),
            deployment_file=deployment_file,
        )
        skip = ["model_id"]
        if settings.otlp_service_name == RouterSettings.otlp_service_name:
            skip.append("otlp_service_name")  # the default of the shards differs from that of the router
        return [*self.model_server, "serve", flags.model_id, *to_argv(flags, skip=skip)]

    def route(
        self,
        settings: ResolvedSettings,
        folder: Path,
        listen_fd: tuple[int, ...] = (),
        ready_fd: int | None = None,
        *,
        accepts_early: bool = False,
        control_socket: Path | None = None,
        keeper: str | None = None,
        generation: int = 0,
        deployment_file: str | None = None,
    ) -> list[str]:
        """Command of the router on sockets that already listen, its own or those of a keeper.

        The API key is passed by its environment.
        """
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
            accepts_early=accepts_early,
            control_socket=None if control_socket is None else str(control_socket),
            keeper=keeper,
            generation=generation,
            deployment_file=deployment_file,
        )
        return [*self.router, *to_argv(flags, skip=["api_key"])]

    def route_models(
        self,
        settings: LauncherSettings,
        hostname: str,
        listen_fd: tuple[int, ...],
        control_socket: Path,
        *,
        keeper: str | None = None,
        ready_fd: int | None = None,
    ) -> list[str]:
        """Command of a router that outlives this process, and serves what the control plane tells it."""
        flags = project(
            settings,
            RouterSettings,
            hostname=hostname,
            tokenizer_name=RouterSettings.tokenizer_name,
            revision=None,
            served_model_name=None,
            max_batch_prefill_tokens=prefill_tokens(settings, context=None),
            shard_connect_timeout=LOADING_SECONDS,
            shard_return_timeout=LOADING_SECONDS if settings.max_restarts else 0,
            listen_fd=listen_fd,
            ready_fd=ready_fd,
            keeper=keeper,
            control_socket=str(control_socket),
            no_model=True,
            shard_tls_cert=settings.worker_tls_cert,
            shard_tls_key=settings.worker_tls_key,
            shard_tls_ca=settings.worker_tls_ca,
        )
        return [*self.router, *to_argv(flags, skip=["api_key"])]

    def keep(
        self,
        settings: LauncherSettings,
        socket_path: str,
        listen_fd: Sequence[int],
        *,
        outlives: bool = False,
        deployment_file: str | None = None,
    ) -> list[str]:
        """Command of the keeper, on sockets that already listen; routers reach it at `socket_path`."""
        argv = [*self.keeper, "--socket", socket_path, "--listen-fd", *map(str, listen_fd)]
        argv += ["--adopt-timeout", f"{settings.adopt_timeout:g}", "--log-level", settings.log_level]
        if not outlives:
            argv += ["--exit-with-parent", str(os.getpid())]
        if deployment_file is not None:
            argv += ["--deployment-file", deployment_file]
        return [*argv, "--json-output"] if settings.json_output else argv


def download_environ(settings: LauncherSettings, environ: Environ) -> dict[str, str]:
    """Environment of the download: the launcher's, without secrets other than the hub's."""
    inherited = {name: value for name, value in environ.items() if name not in (*API_KEYS, "LOG_LEVEL")}
    return _without_inert(inherited) | _hub(settings, environ)


def shard_environ(settings: ResolvedSettings, environ: Environ, rank: int) -> dict[str, str]:
    """Environment of one shard: variables that torch, NCCL and OpenMP read before flags are parsed."""
    count = settings.num_threads or settings.most_threads
    threads = {} if count is None else _threads(count)
    return (
        {"OMP_WAIT_POLICY": "PASSIVE"}  # a spinning barrier would occupy the core that its last thread needs
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


def router_environ(settings: LauncherSettings, environ: Environ) -> dict[str, str]:
    """Environment of the router: the launcher's plus the API key."""
    inherited = {name: value for name, value in _without_inert(environ).items() if name not in API_KEYS}
    key = {"FUNITEL_API_KEY": str(settings.api_key)} if settings.api_key else {}
    return inherited | _hub(settings, environ) | key


def _without_inert(environ: Environ) -> dict[str, str]:
    """Drop variables without effect, which the launcher has logged."""
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
