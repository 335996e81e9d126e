"""Check the header of a request by RFC 9112, beyond what the parser checks, and write its target in one form. Pure."""

import re
from collections.abc import Iterator
from http import HTTPStatus

from funitel.router.transport.framing import LimitExceeded, malformed

Headers = list[tuple[bytes, bytes]]  # names in lower case

_HOST = rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~%!$&'()*+,;=]*)(?::[0-9]*)?"
_VALID_HOST = re.compile(_HOST)
_ABSOLUTE = re.compile(rb"https?://(%b)([/?].*)?" % _HOST, re.IGNORECASE)
_MAX_SHOWN = 80


def check_version(version: str) -> None:
    """Raise LimitExceeded unless a version is 1.x."""
    if not version.startswith("1."):
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        raise LimitExceeded("malformed", status, f"the version must be HTTP/1.0 or HTTP/1.1. Given: HTTP/{version}")


def body_length(version: str, headers: Headers) -> int | None:
    """Return the length of a body in bytes; None for a chunked one.

    Raises:
        LimitExceeded: the header says it in a way that another server may understand otherwise.
    """
    codings = list(_values(headers, b"transfer-encoding"))
    if not codings:
        length = next(_values(headers, b"content-length"), b"0")  # the parser takes one of digits
        return int(length)
    if version == "1.0":
        raise malformed("Transfer-Encoding is not for HTTP/1.0")
    if len(codings) != 1 or codings[0].lower() != b"chunked":
        raise malformed(f"Transfer-Encoding must be chunked. Given: {_shown(b', '.join(codings))}")
    return None


def origin_target(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """Return the path and query of a request; the host of an absolute target takes the place of that in `headers`.

    Raises:
        LimitExceeded: there is not exactly one valid host, or the target is not one for a server.
    """
    _check_host(version, headers)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None and absolute[1]:
        headers[:] = [(b"host", absolute[1]), *(header for header in headers if header[0] != b"host")]
        path = absolute[2] or b"/"
        target = path if path.startswith(b"/") else b"/" + path
    elif not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
        raise malformed(f"the target must be a path or an http URL. Given: {_shown(target)}")
    if b"#" in target:
        raise malformed(f"the target must have no fragment. Given: {_shown(target)}")
    return target


def _check_host(version: str, headers: Headers) -> None:
    hosts = list(_values(headers, b"host"))
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise malformed(f"the header must have exactly one Host. Given: {len(hosts)}")
    if hosts and _VALID_HOST.fullmatch(hosts[0]) is None:
        raise malformed(f"Host is not valid. Given: {_shown(hosts[0])}")


def _values(headers: Headers, name: bytes) -> Iterator[bytes]:
    return (value for header, value in headers if header == name)


def _shown(value: bytes) -> str:
    return ascii(value[:_MAX_SHOWN].decode("latin-1"))
