"""TLS from PEM files: contexts for HTTP, credentials for gRPC.

What is wrong with a file is one line that names its flag. Knows no sockets: whoever listens or connects takes what is
made here.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from funitel.proto.errors import SettingsError


class _Encrypted(Exception):
    """A key that cannot be read without a passphrase, which nobody is there to give."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate, with its chain, and of its key; `flag` begins the names of the flags of both."""

    cert: str
    key: str
    flag: str = "--tls"

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let a context show the certificate, from the next handshake on.

        Raises:
            SettingsError: a file cannot be read, is no PEM, is encrypted, or the two do not belong together.
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
    """Make the context of an HTTPS server: TLS 1.2 and up; with `client_ca`, clients must show a certificate of it.

    Raises:
        SettingsError: a file is not what it must be.
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
    """Make the context of a client that trusts the authorities in `ca`, or the system's, and may show a certificate.

    Raises:
        SettingsError: a file is not what it must be.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        trust(context, ca, "--tls-ca")
    if pair is not None:
        pair.load_into(context)
    return context


def trust(context: ssl.SSLContext, ca: str, flag: str) -> None:
    """Let a context trust the certificates of a file that `flag` gave; raises SettingsError when it has none."""
    _read(ca, flag)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise SettingsError(f"{flag} {ca} must be a PEM file of certificates: {error.reason or error}") from error


# gRPC


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Files by which router and shards know each other over TCP: each shows a certificate of one authority."""

    pair: Pair
    ca: str

    @classmethod
    def of(cls, cert: str | None, key: str | None, ca: str | None) -> "MutualTls | None":
        """Of the three settings; None when none is given. Raises SettingsError when only some are."""
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None or ca is None:
            raise SettingsError("--shard-tls-cert, --shard-tls-key and --shard-tls-ca need each other: give all three")
        return cls(Pair(cert, key, "--shard-tls"), ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What a router shows, and whom it trusts; raises SettingsError for a file that is not what it must be."""
        ca, key, cert = self._contents()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """What a shard shows, and whom it trusts; raises as `channel_credentials`."""
        ca, key, cert = self._contents()
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)

    def _contents(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key and certificate, tried before: gRPC says of a wrong one only that nothing works."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.pair.load_into(context)
        trust(context, self.ca, "--shard-tls-ca")
        return _read(self.ca, "--shard-tls-ca"), _read(self.pair.key, "key"), _read(self.pair.cert, "cert")
