"""Log in at a provider of OpenID Connect: its settings, a login that has begun, and the person that it names."""

import secrets
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from funitel.proto.errors import SettingsError, Unauthorized
from funitel.proto.extras import check_extra
from funitel.proto.security.roles import Role

TRY_SECONDS = 600  # from the beginning of a login to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """A provider.

    Attributes:
        issuer: its URL, below which its discovery document is.
        client_id: of this server at the provider.
        client_secret: None for a public client.
        redirect_url: where the provider sends browsers back to; None: where the browser began.
        role_claim: claim of the ID token, or of the provider's answer about the user, with roles; without it new users
            get the role `user`, and the provider changes none.
    """

    issuer: str
    client_id: str
    client_secret: str | None = None
    redirect_url: str | None = None
    role_claim: str | None = None


def read_secret(path: str | None) -> str | None:
    """The secret of a file; raises SettingsError where it cannot be read, or is empty."""
    if path is None:
        return None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"--oidc-client-secret-file {path}: {why}") from error
    if not secret:
        raise SettingsError(f"--oidc-client-secret-file {path} is empty")
    return secret


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginTry:
    """A login that has begun, which the browser keeps in a signed cookie until the provider sends it back."""

    state: str
    nonce: str
    verifier: str
    redirect_url: str

    @classmethod
    def new(cls, redirect_url: str) -> "LoginTry":
        """A login that begins."""
        return cls(
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            redirect_url=redirect_url,
        )

    def check_state(self, state: str) -> None:
        """Raise Unauthorized where an answer of the provider belongs to another login."""
        if not secrets.compare_digest(state.encode(), self.state.encode()):
            raise Unauthorized("this answer of the provider belongs to no login that was begun here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a provider says of a person.

    Attributes:
        subject: issuer and subject, unique for ever.
        name: that the person is known by at the provider.
        role: by the claim of roles, the least one where none of ours is in it; None where the provider gives no roles.
    """

    subject: str
    name: str
    role: Role | None


class OidcProvider(Protocol):
    """One provider."""

    settings: OidcSettings

    async def authorization_url(self, login: LoginTry) -> str:
        """Where the browser is sent; raises NotReady where the provider does not answer."""

    async def identity(self, login: LoginTry, code: str) -> Identity:
        """The person that a code of the provider stands for; raises Unauthorized, or NotReady."""


def provider_of(settings: OidcSettings) -> OidcProvider:
    """The provider, with its libraries, which are imported now.

    Raises:
        SettingsError: the issuer is no https URL.
        MissingPackage: the extra is not installed.
    """
    url = urlsplit(settings.issuer)
    is_local = url.hostname in ("localhost", "127.0.0.1", "::1")
    if (url.scheme != "https" and not (url.scheme == "http" and is_local)) or not url.hostname:
        raise SettingsError(f"--oidc-issuer must be an https:// URL, given {settings.issuer}")
    check_extra("oidc", "--oidc-issuer")
    provider: OidcProvider = import_module("funitel.launcher.tenants.oidc_client").OidcClient(settings)
    return provider
