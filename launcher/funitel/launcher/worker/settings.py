"""Settings of `funitel worker`."""

import os
import socket
from dataclasses import dataclass

from funitel.launcher.worker_wire.handshake import Url
from funitel.launcher.worker_wire.messages import check_worker_name
from funitel.proto.security.tls import MutualTls, Pair
from funitel.proto.settings.bounds import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from funitel.proto.settings.fields import check_bounds, require, setting
from funitel.proto.settings.listen_address import is_loopback


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Offer this machine to a control plane, which then runs shards of its models here; see docs/machines.md."""

    join: str | None = setting(
        None, "Where the control plane listens for workers: https://HOST:PORT, or http://HOST:PORT without TLS."
    )
    name: str | None = setting(None, "Name of this worker, unique in its fleet; the host's name when not given.")
    cores: int | None = setting(
        None,
        "Number of cores that shards may use; those that this process may use when not given.",
        bounds=AT_LEAST_ONE,
    )
    memory: float | None = setting(
        None, "GiB of memory that are offered; 85 % of what this machine has when not given.", bounds=POSITIVE
    )
    gpus: int | None = setting(
        None,
        "Number of GPUs that are offered, the first ones; all that are visible when not given.",
        bounds=NOT_NEGATIVE,
    )
    listen: str | None = setting(
        None,
        "Address of this machine on which shards listen; when not given, the one that reaches the control plane.",
        env="FUNITEL_WORKER_LISTEN",
    )
    tls_cert: str | None = setting(
        None, "PEM file of this worker's certificate, for the control plane, the router and other workers.", env=None
    )
    tls_key: str | None = setting(None, "PEM file of the key of --tls-cert.", env=None)
    tls_ca: str | None = setting(
        None, "PEM file of authorities: the control plane and the router must show a certificate of theirs.", env=None
    )
    insecure_workers: bool = setting(
        False, "Join a control plane of another machine without TLS; anyone on the network can then run models here."
    )
    cache_dir: str | None = setting(
        None, "Folder for models fetched and converted; ~/.cache/funitel when not given.", env="FUNITEL_CACHE"
    )
    graceful_termination_timeout: int = setting(
        90, "Seconds that each process has to stop before it is killed.", short="-g", bounds=NOT_NEGATIVE
    )
    json_output: bool = setting(False, "Log JSON lines.")
    log_level: str = setting("INFO", "Least severe log level: debug, info, warning, error.")

    def __post_init__(self) -> None:
        check_bounds(self)
        require(self.join is not None, "--join must name the control plane, such as https://HOST:PORT")
        try:
            check_worker_name(self.worker_name)
        except ValueError as error:
            require(False, f"--name {error}")
        url = self.url
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        require(
            all(files) or not any(files), "--tls-cert, --tls-key and --tls-ca need each other: give all three or none"
        )
        require(not url.is_tls or all(files), f"--join {self.join} needs --tls-cert, --tls-key and --tls-ca")
        require(url.is_tls or not any(files), f"--tls-cert {self.tls_cert} is for https, --join is {self.join}")
        require(
            url.is_tls or self.insecure_workers or is_loopback(url.host),
            f"--join {self.join} is another machine without TLS: give https:// and --tls-cert, --tls-key and --tls-ca, "
            "or --insecure-workers",
        )

    @property
    def url(self) -> Url:
        """Where the control plane listens."""
        return Url.parse(self.join or "")

    @property
    def worker_name(self) -> str:
        """The name, as given or the host's."""
        return self.name or socket.gethostname().partition(".")[0]

    @property
    def tls(self) -> MutualTls | None:
        """The files of both ends' TLS; None for plain connections."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return MutualTls(Pair(self.tls_cert, self.tls_key), self.tls_ca)

    def check_cores(self) -> None:
        """Raise SettingsError where this process may not use so many cores."""
        usable = len(os.sched_getaffinity(0))
        require(self.cores is None or self.cores <= usable, f"--cores must be within 1..{usable}, given {self.cores}")
