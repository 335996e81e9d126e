"""Make TLS contexts for HTTP and credentials for gRPC from PEM files; errors name the flag of the file."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from funitel.proto.errors import SettingsError
from funitel.proto.process.deferred_module import deferred

if TYPE_CHECKING:
    import grpc
else:
    grpc = deferred("grpc")


class _Encrypted(Exception):
    """A key that needs a passphrase."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate with its chain, and of its key; `flag` is the common prefix of their flags."""

    cert: str
    key: str
    flag: str = "--tls"

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the certificate into a context, for further handshakes.

        Raises:
            SettingsError: a file cannot be read, is no PEM, is encrypted, or the key does not match.
        """
        cert, key = f"{self.flag}-cert {self.cert}", f"{self.flag}-key {self.key}"
        _read(self.cert, f"{self.flag}-cert")
        _read(self.key, f"{self.flag}-key")
        try:
            context.load_cert_chain(self.cert, self.key, password=_refuse_passphrase)
        except _Encrypted:
            raise SettingsError(f"{key} is encrypted: give a key without a passphrase") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise SettingsError(f"{key} is not the key of {cert}") from error
            raise SettingsError(f"{cert} and {key} must be PEM files: {error.reason or error}") from error


def _refuse_passphrase() -> NoReturn:
    raise _Encrypted


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error


def server_context(pair: Pair, client_ca: str | None = None) -> ssl.SSLContext:
    """Make the context of an HTTPS server, TLS 1.2 or later; with `client_ca`, client certificates are required.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    pair.load_into(context)
    if client_ca is not None:
        trust(context, client_ca, f"{pair.flag}-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str | None = None, pair: Pair | None = None) -> ssl.SSLContext:
    """Make the context of a client that trusts the authorities in `ca`, or the system's, with an optional certificate.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        trust(context, ca, "--tls-ca")
    if pair is not None:
        pair.load_into(context)
    return context


def trust(context: ssl.SSLContext, ca: str, flag: str) -> None:
    """Add the certificates of a file, given by `flag`, as trusted; raises SettingsError when it has none."""
    _read(ca, flag)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise SettingsError(f"{flag} {ca} must be a PEM file of certificates: {error.reason or error}") from error


# gRPC


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Files for mutual TLS between router and shards over TCP: each presents a certificate of one authority."""

    pair: Pair
    ca: str

    @classmethod
    def of(cls, cert: str | None, key: str | None, ca: str | None) -> "MutualTls | None":
        """Build from the three settings; None when none is given. Raises SettingsError when only some are."""
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None or ca is None:
            raise SettingsError("--shard-tls-cert, --shard-tls-key and --shard-tls-ca need each other: give all three")
        return cls(Pair(cert, key, "--shard-tls"), ca)

    def channel_credentials(self) -> "grpc.ChannelCredentials":
        """Credentials of a router; raises SettingsError for an invalid file."""
        ca, key, cert = self._contents()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server_credentials(self) -> "grpc.ServerCredentials":
        """Credentials of a shard; raises as `channel_credentials`."""
        ca, key, cert = self._contents()
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)

    def _contents(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key and certificate, validated first, since gRPC gives no reason for an invalid one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.pair.load_into(context)
        trust(context, self.ca, "--shard-tls-ca")
        return _read(self.ca, "--shard-tls-ca"), _read(self.pair.key, "key"), _read(self.pair.cert, "cert")
