"""A replica job as machines that are not this one are told it: orders to prepare and to start ranks."""

from collections.abc import Sequence
from pathlib import Path

from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.machine.rank_flags import flags_to_send
from funitel.launcher.worker_wire.messages import Prepare, Prepared, Start
from funitel.proto.errors import StartupError
from funitel.proto.process.version import version

BUSY_FACTOR = 10  # times the step timeout, which the router extends for first and long steps


def num_ranks(job: ReplicaJob) -> int:
    """Processes of a replica."""
    return job.settings.num_shard


def order_to_prepare(job: ReplicaJob, start_id: str, ranks: Sequence[int], ports: Sequence[int]) -> Prepare:
    """What the machine of some ranks is to prepare; `ports` are wanted for them."""
    settings = job.settings
    path = Path(settings.model_id)
    return Prepare(
        job=start_id,
        model=job.model,
        replica=job.replica,
        model_id=str(path.absolute()) if path.exists() else settings.model_id,
        is_path=path.exists(),
        revision=settings.revision,
        device=settings.device,
        ranks=tuple(ranks),
        ports=tuple(ports),
        rank_bytes=job.rank_bytes,
    )


def order_to_start(job: ReplicaJob, start_id: str, ranks: Sequence[int], first: Prepared) -> Start:
    """What the machine of some ranks is to start; `first` is what the machine of rank 0 has prepared."""
    program = len(job.commands.model_server) + 2  # the words before the flags: the program, serve, the model
    lines = [job.commands.shard(job.settings, job.folder, rank)[program:] for rank in ranks]
    return Start(
        job=start_id,
        flags=tuple(flags_to_send(line) for line in lines),
        world_size=num_ranks(job),
        master_addr=first.address,
        master_port=first.master_port,
    )


def check_release(place: str, prepared: Prepared) -> None:
    """Raise StartupError where a machine has another release of funitel."""
    if prepared.version != version():
        raise StartupError(f"{place} has funitel {prepared.version}, the control plane {version()}")


def address_of(host: str, port: int) -> str:
    """The address of a rank, as the router connects."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
