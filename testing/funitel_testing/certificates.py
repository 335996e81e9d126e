"""Certificates for tests: an authority, and what it signs, as PEM files."""

from dataclasses import dataclass
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate with its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA(organization_name=name)
        self.ca = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def sign(self, name: str, *hosts: str) -> Files:
        """Make, or replace, the files of a certificate; for this machine where no hosts are named."""
        made = self._ca.issue_cert(*(hosts or HOSTS))
        files = Files(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        Path(files.cert).write_bytes(chain)
        made.private_key_pem.write_to_path(files.key)
        return files
