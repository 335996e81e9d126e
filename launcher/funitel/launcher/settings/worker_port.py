"""Settings of the port on which a control plane listens for workers."""

from dataclasses import dataclass

from funitel.proto.security.tls import MutualTls, Pair
from funitel.proto.settings.bounds import POSITIVE, Bounds
from funitel.proto.settings.fields import check_bounds, require, setting
from funitel.proto.settings.listen_address import is_loopback


@dataclass(frozen=True, kw_only=True)
class WorkerPortSettings:
    """Where workers join, and how they are met."""

    worker_port: int | None = setting(
        None, "Port for workers to join; none can when not given.", bounds=Bounds(minimum=0, maximum=65535)
    )
    worker_hostname: str | None = setting(
        None, "Address of --worker-port; every address with --worker-tls-cert, 127.0.0.1 without."
    )
    worker_tls_cert: str | None = setting(
        None, "PEM file of the certificate that workers and shards on them are shown.", env=None
    )
    worker_tls_key: str | None = setting(None, "PEM file of the key of --worker-tls-cert.", env=None)
    worker_tls_ca: str | None = setting(
        None, "PEM file of authorities: workers and shards on them must show a certificate of theirs.", env=None
    )
    worker_timeout: float = setting(
        10.0, "Seconds without a word of a worker after which it is lost, with its replicas.", bounds=POSITIVE
    )
    insecure_workers: bool = setting(
        False, "Let workers of other machines join without TLS; anyone on the network can then pose as one."
    )

    def check_worker_port(self) -> None:
        """Raise SettingsError where they contradict each other, or are not safe."""
        check_bounds(self)
        files = (self.worker_tls_cert, self.worker_tls_key, self.worker_tls_ca)
        given = next(filter(None, files), None)
        require(
            all(files) or given is None,
            "--worker-tls-cert, --worker-tls-key and --worker-tls-ca need each other: give all three",
        )
        require(given is None or self.worker_port is not None, f"--worker-tls-cert {given} needs --worker-port")
        require(
            given is not None or self.insecure_workers or is_loopback(self.worker_address),
            f"--worker-hostname {self.worker_hostname} without TLS lets anyone pose as a worker: give "
            "--worker-tls-cert, --worker-tls-key and --worker-tls-ca, or --insecure-workers",
        )

    @property
    def worker_address(self) -> str:
        """The address to listen on."""
        every = self.worker_tls_cert is not None or self.insecure_workers
        return self.worker_hostname or ("0.0.0.0" if every else "127.0.0.1")

    @property
    def worker_tls(self) -> MutualTls | None:
        """The files of both ends' TLS; None for plain connections."""
        if self.worker_tls_cert is None or self.worker_tls_key is None or self.worker_tls_ca is None:
            return None
        return MutualTls(Pair(self.worker_tls_cert, self.worker_tls_key, "--worker-tls"), self.worker_tls_ca)
