"""Decide which servers get an API key: none but those for which it was given."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from funitel.proto.settings.variables import PREFIX, variable_of_value

URL_VARIABLE = "FUNITEL_URL"
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Credential:
    """The key for one server, and the advice for the case that it asks for another."""

    key: str | None = None
    advice: str = "give --api-key or set FUNITEL_API_KEY"


def credential_for(api_key: str | None, url: str, environ: Mapping[str, str] = os.environ) -> Credential:
    """The credential for the server at `url`.

    A key that was given as a flag is for the URL beside it. One of the environment is for this machine, and that of
    `FUNITEL_API_KEY` also for the servers (scheme, host and port) that `FUNITEL_URL` names.
    """
    variable = variable_of_value(api_key)
    if api_key is None:
        return Credential()
    if variable is None or _origin(url)[1] in THIS_MACHINE:
        return Credential(str(api_key))
    if not variable.startswith(PREFIX):
        return Credential(None, f"{variable} is for servers of this machine: give --api-key")
    if _origin(url) in map(_origin, environ.get(URL_VARIABLE, "").split()):
        return Credential(str(api_key))
    return Credential(None, f"{variable} is for the server that {URL_VARIABLE} names: set that, or give --api-key")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port; a URL that is none has no host."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None, None
