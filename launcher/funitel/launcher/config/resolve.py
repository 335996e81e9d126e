"""Resolve settings: decide each one that was not given, from the machine and the model.

Pure but for queries of the machine: free ports, GPUs, NUMA nodes and cores.
"""

import dataclasses
import json
import logging
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from funitel.launcher.config.sockets import free_port, free_ports
from funitel.launcher.config.topology import ShardPlacement, assign_cores, usable_nodes
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.settings.shard_count import is_auto
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.process.usable_cores import count_usable_cores
from funitel.proto.security.keys import read_keys
from funitel.proto.security.tls import server_context
from funitel.proto.settings.fields import project, require
from funitel.proto.settings.layer_parts import placing_flag
from funitel.proto.settings.listen_address import is_local_by_default, listen_address
from funitel.router.settings import RouterSettings, opens_port

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
# Names of the same value in config.json, by family.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_KEYS = ("num_attention_heads", "n_head")
SECRETS = frozenset({"api_key"})


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(LauncherSettings):
    """Launcher settings with every value decided that the machine determines."""

    num_shard: int
    master_port: int  # of the first replica
    master_ports: tuple[int, ...]  # of every replica
    shard_uds_path: str
    served_model_name: str
    hostname: str
    is_local_by_default: bool = False  # no address was given, and no access control for this server
    most_threads: int | None = None  # of each shard, where the shard itself decides the number
    core_assignments: tuple[ShardPlacement, ...] = ()  # of every shard of every replica, with --numa
    gpus: tuple[str, ...] = ()  # divided among several replicas, as CUDA names them
    replicas_on_host: int = 1  # of the deployment, in the settings of one of them
    task: str = "generate"  # of the model: "generate", "embed" or "classify"


def resolve(settings: LauncherSettings, num_shard: int, uds_path: str, gpus: tuple[str, ...] = ()) -> ResolvedSettings:
    """Decide the settings that do not depend on the model.

    Args:
        settings: as given.
        num_shard: shards of each replica.
        uds_path: socket path of the first replica.
        gpus: those divided among several replicas; empty on a CPU.

    Raises:
        SettingsError: a shard or the router would refuse its settings; this is checked before anything loads.
    """
    max_input = settings.max_input_tokens if settings.max_input_length is None else settings.max_input_length
    num_shards = num_shard * settings.num_replicas
    require(
        not gpus or num_shards <= len(gpus),
        f"--num-replicas {settings.num_replicas} with --num-shard {num_shard} need {num_shards} GPUs, "
        f"there are {len(gpus)}",
    )
    pinned = _assign_cores(num_shards) if settings.numa else ()
    most_threads = None
    if settings.num_threads is None and not settings.numa:  # a pinned shard has one thread for each of its cores
        most_threads = share_of_cores(settings.device, num_shards)
    ports = _master_ports(settings)
    asked = (settings.hostname, settings.default_hostname)
    resolved = project(
        settings,
        ResolvedSettings,
        num_shard=num_shard,
        sharded=num_shard > 1,
        most_threads=most_threads,
        max_input_tokens=max_input,
        max_input_length=None,
        hostname=listen_address(*asked, is_guarded=opens_port(settings)),
        is_local_by_default=is_local_by_default(*asked, is_guarded=opens_port(settings)),
        port=settings.port or free_port(),
        master_port=ports[0],
        master_ports=ports,
        shard_uds_path=uds_path,
        served_model_name=settings.served_model_name or settings.model_id,
        core_assignments=pinned,
        gpus=gpus,
    )
    check_children(resolved)
    return resolved


def _assign_cores(num_shards: int) -> tuple[ShardPlacement, ...]:
    """Placement of the shards; one log line says where it differs from what --numa asks for."""
    nodes = usable_nodes()
    num_cores = sum(len(core) for node in nodes for core in node.cores)
    if num_cores < num_shards:
        logger.warning("--numa: %d shards share %d cores, so some share a core", num_shards, num_cores)
    elif len(nodes) == 1:
        logger.info("--numa: this machine has one NUMA node: each shard is pinned to a share of its cores")
    elif num_shards < len(nodes):
        logger.warning("--numa: %d shards use one NUMA node each, of %d", num_shards, len(nodes))
    return assign_cores(nodes, num_shards)


def _master_ports(settings: LauncherSettings) -> tuple[int, ...]:
    if settings.master_port:
        return tuple(range(settings.master_port, settings.master_port + settings.num_replicas))
    return free_ports(settings.num_replicas)


def check_children(settings: ResolvedSettings) -> None:
    """Raise SettingsError for what a shard or the router would refuse."""
    shard = {"model_id": settings.model_id, "sharded": bool(settings.sharded), "world_size": settings.num_shard}
    project(settings, ModelServerSettings, **shard)
    project(settings, RouterSettings, keeper=None, max_batch_prefill_tokens=prefill_tokens(settings, context=None))
    check_files(settings)


def check_files(settings: LauncherSettings) -> None:
    """Raise SettingsError for a file of keys or certificates that the router would refuse."""
    if settings.api_key_file is not None:
        read_keys(settings.api_key_file)
    if settings.tls_pair is not None:
        server_context(settings.tls_pair, settings.tls_client_ca)
    probe_context(settings)


def probe_context(settings: LauncherSettings) -> ssl.SSLContext | None:
    """TLS context for the health check of the router by the launcher; None where HTTP is plain.

    The name is not checked: the router is a child process on a local address, which no certificate names.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    if settings.tls_pair is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if settings.tls_probe_pair is not None:
        settings.tls_probe_pair.load_into(context)
    return context


def fit_to_model(settings: ResolvedSettings, folder: Path) -> ResolvedSettings:
    """Decide the settings that depend on the model's config.json.

    Raises:
        SettingsError: config.json is not JSON, or the model has fewer query heads than there would be shards.
    """
    config = _read_config(folder)
    num_heads = _count(config, HEAD_KEYS)
    stages = settings.partition
    num_ranks = settings.num_shard if stages is None else stages.num_tensor_ranks
    asked = f"--num-shard {num_ranks}" if stages is None else f"{num_ranks} ranks of a stage of --partition {stages}"
    require(
        num_heads is None or num_ranks <= num_heads,
        f"{asked} is more than the {num_heads} query heads of {settings.model_id}: give at most {num_heads}",
    )
    _check_stages(settings, _count(config, LAYER_KEYS))
    context = _count(config, CONTEXT_KEYS)
    tokens = prefill_tokens(settings, context)
    return dataclasses.replace(settings, max_batch_prefill_tokens=tokens, task=_task(config))


def _check_stages(settings: ResolvedSettings, num_layers: int | None) -> None:
    """Raise SettingsError where pipeline stages do not fit a model of so many layers; the shards know more."""
    stages, layers = settings.partition, settings.layers
    if stages is None or num_layers is None:
        return
    require(
        len(stages) <= num_layers,
        f"--partition {stages} has {len(stages)} stages, {settings.model_id} has {num_layers} layers",
    )
    require(
        layers is None or sum(layers) == num_layers,
        f"--layers {layers} adds up to {layers and sum(layers)} layers, {settings.model_id} has {num_layers}",
    )


def _task(config: Mapping[str, Any]) -> str:
    """Task of a model, by the suffix of its class name at Hugging Face."""
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classify"
    if any(name.endswith(("ForMaskedLM", "Model")) and not name.endswith("LMHeadModel") for name in names):
        return "embed"
    return "generate"


def decide_num_shard(settings: LauncherSettings, num_devices: int | None) -> int:
    """Number of shards that each replica is split over.

    Source: contract reference 2.3; a number of shards overrides `--sharded false`.

    Args:
        settings: `sharded`, `num_shard` and `numa` as given.
        num_devices: visible devices, divided among replicas; None when unknown.
    """
    if settings.partition is not None:
        num_ranks = settings.partition.num_ranks
        require(
            settings.num_shard in (None, num_ranks) or is_auto(settings.num_shard),
            f"--num-shard {settings.num_shard} and --partition {settings.partition} of {num_ranks} ranks contradict "
            f"each other: leave out --num-shard",
        )
        return num_ranks
    placing = placing_flag(settings.gpu_layers, settings.layer_parts)
    if placing is not None:  # one shard, however many GPUs there are
        require(not settings.sharded, f"{placing} cannot be used with --sharded true: one shard has all layers")
        is_one = settings.num_shard in (None, 1) or is_auto(settings.num_shard)
        require(is_one, f"{placing} cannot be used with --num-shard {settings.num_shard}: one shard has all layers")
        return 1
    if settings.num_shard is not None and not is_auto(settings.num_shard):
        return int(settings.num_shard)
    if not num_devices and settings.numa:
        num_devices = len(usable_nodes())
    if num_devices is not None:
        num_devices //= settings.num_replicas
    if not settings.sharded:
        return 1 if settings.sharded is False else num_devices or 1
    if num_devices is None:
        raise SettingsError("--sharded true: the number of devices is unknown here, give --num-shard")
    require(num_devices > 1, f"--sharded true needs more than one device, found {num_devices}: give --num-shard")
    return num_devices


def shards_and_gpus(settings: LauncherSettings, environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """The number of shards of each replica, and the GPUs that are divided among several replicas."""
    gpus = visible_gpus(settings.device, environ)
    is_asked = settings.num_replicas > 1 or is_auto(settings.num_shard)  # each replica needs a list of its own
    if gpus is None and is_asked and settings.device != "cpu":
        gpus = listed_gpus()
    num_shard = decide_num_shard(settings, None if gpus is None else len(gpus))
    return num_shard, (gpus or ()) if settings.num_replicas > 1 else ()


def visible_gpus(device: str, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that the environment makes visible, as CUDA names them; None if it names none, and on a CPU."""
    if device == "cpu":
        return None
    if "CUDA_VISIBLE_DEVICES" in environ:
        # As CUDA reads it: the list ends before the first -1, and an empty one hides every device.
        named = (item.strip() for item in environ["CUDA_VISIBLE_DEVICES"].split(","))
        return tuple(item for item in takewhile(lambda item: item != "-1", named) if item)
    listed = [item for item in environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    if listed in (["all"], ["void"]):
        return listed_gpus()
    return _numbered(len(listed)) if listed and listed != ["none"] else None


def listed_gpus() -> tuple[str, ...] | None:
    """The GPUs that nvidia-smi lists; None when it fails."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _numbered(sum(line.startswith("GPU ") for line in answer.stdout.splitlines()))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def share_of_cores(device: str, num_shards: int) -> int | None:
    """Cores of each shard when all shards share them evenly; None on CUDA, where the shard decides."""
    return None if device == "cuda" else max(1, count_usable_cores() // num_shards)


def prefill_tokens(settings: LauncherSettings, context: int | None) -> int:
    """Maximum of prompt tokens in one step: as given, or by context and KV pool where these are known."""
    if settings.max_batch_prefill_tokens is not None:
        return settings.max_batch_prefill_tokens
    limits = (PREFILL_TOKENS, context, settings.max_batch_total_tokens)
    return min(limit for limit in limits if limit is not None)


def _read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; empty when it is missing or no object, which the shards report."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError(f"{folder / 'config.json'} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of `keys` that is a count; None when none is."""
    counts = (config.get(key) for key in keys)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def describe(settings: LauncherSettings) -> str:
    """Render every setting on one line, secrets masked."""
    return " ".join(f"{f.name}={_shown(f.name, getattr(settings, f.name))}" for f in dataclasses.fields(settings))


def _shown(name: str, value: Any) -> str:
    return "***" if name in SECRETS and value else repr(value) if isinstance(value, str) else str(value)
