"""How a client meets an https server: whom it trusts, and what it shows."""

import ssl
from typing import Any

from funitel.proto.settings import require
from funitel.proto.tls import Pair, client_context


def check_client_tls(settings: Any, *urls: str | None) -> None:
    """Raise SettingsError where the settings of TLS of a client lack one another, or an https server."""
    given = [flag for flag in ("tls_ca", "tls_cert", "tls_key") if getattr(settings, flag) is not None]
    is_https = any(url is not None and url.startswith("https://") for url in urls)
    flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
    require(
        is_https or not given, f"{flags} {'is' if len(given) == 1 else 'are'} for a --url that begins with https://"
    )
    require(
        (settings.tls_cert is None) == (settings.tls_key is None),
        f"--tls-cert and --tls-key need each other, given {settings.tls_cert or settings.tls_key} alone",
    )


def context_of(settings: Any) -> ssl.SSLContext | None:
    """The context for https servers, of the settings that `check_client_tls` has checked; None leaves it to the system.

    Raises:
        SettingsError: a file is not what it must be.
    """
    if settings.tls_ca is None and settings.tls_cert is None:
        return None
    pair = None if settings.tls_cert is None else Pair(settings.tls_cert, settings.tls_key)
    return client_context(settings.tls_ca, pair)
