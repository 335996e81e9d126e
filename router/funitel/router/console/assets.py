"""The files of the console, compressed once, with the headers that keep a page to this server.

`assets/vendor` has libraries as their packages have them; `vendor.toml` lists versions, licences and hashes.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and requests of this server only, none of them inline; no page of another site may frame it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; `etag` names its content."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """All files by their path below `/ui/`; read when a page is first opened."""
    root = files("funitel.router.console") / "assets"
    return {path: _asset(path, each.read_bytes()) for path, each in _found(root, "")}


def _found(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for each in folder.iterdir():
        path = prefix + each.name
        if each.is_dir():
            found += _found(each, f"{path}/")
        elif PurePosixPath(path).suffix in MEDIA_TYPES:
            found.append((path, each))
    return found


def _asset(path: str, content: bytes) -> Asset:
    digest = hashlib.sha256(content).hexdigest()
    media_type = MEDIA_TYPES[PurePosixPath(path).suffix]
    return Asset(content, gzip.compress(content, mtime=0), media_type, f'"{digest[:32]}"')
