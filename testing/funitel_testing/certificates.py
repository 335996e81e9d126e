"""Certificates for tests of TLS, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    chain: Path
    key: Path


def self_signed(folder: Path, name: str = "localhost") -> Certificate:
    """A certificate of `name` and 127.0.0.1 that vouches for itself, for a day."""
    certificate = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-days", "1", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
        + ["-keyout", str(certificate.key), "-out", str(certificate.chain)],
        check=True,
        capture_output=True,
    )
    return certificate
