"""A client of a provider of OpenID Connect: the authorization code flow with PKCE, and the ID token's checks.

Requests to the provider are made by Authlib over httpx, tokens are checked by joserfc: the extra `oidc`.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from httpx import AsyncClient, HTTPError
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from funitel.launcher.tenants.oidc import Identity, LoginTry, OidcSettings
from funitel.proto.errors import NotReady, Unauthorized
from funitel.proto.security.roles import Role

SCOPE = "openid profile email"
DISCOVERY = "/.well-known/openid-configuration"
TIMEOUT_SECONDS = 10.0
FACTS_SECONDS = 3600.0  # that the provider's keys and addresses are kept
CLOCK_SECONDS = 60  # by which the clocks of two machines may differ
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the provider says of itself."""

    document: dict[str, Any]
    keys: KeySet
    until: float


class OidcClient:
    """One provider. Event loop only."""

    def __init__(self, settings: OidcSettings) -> None:
        self.settings = settings
        self._facts: _Facts | None = None
        self._reading = asyncio.Lock()

    async def authorization_url(self, login: LoginTry) -> str:
        """Where the browser is sent; raises NotReady where the provider does not answer."""
        facts = await self._provider()
        async with self._client(login) as client:
            url, _ = client.create_authorization_url(
                facts.document["authorization_endpoint"],
                state=login.state,
                nonce=login.nonce,
                code_verifier=login.verifier,
            )
        return str(url)

    async def identity(self, login: LoginTry, state: str, code: str) -> Identity:
        """The person that a code of the provider stands for.

        Raises:
            Unauthorized: state, code or token are wrong.
            NotReady: the provider does not answer.
        """
        if not secrets.compare_digest(state.encode(), login.state.encode()):
            raise Unauthorized("this answer of the provider belongs to no login that was begun here")
        facts = await self._provider()
        token = await self._token(facts, login, code)
        claims = self._checked(facts, token, login)
        return Identity(
            subject=f"{claims['iss']} {claims['sub']}",
            name=str(claims.get("preferred_username") or claims.get("email") or claims.get("name") or claims["sub"]),
            role=self._role(claims),
        )

    async def _token(self, facts: _Facts, login: LoginTry, code: str) -> str:
        try:
            async with self._client(login) as client:
                answer = await client.fetch_token(
                    facts.document["token_endpoint"], code=code, code_verifier=login.verifier
                )
        except OAuthError as error:
            raise Unauthorized(f"the provider refuses the code: {error.error}") from error
        except HTTPError as error:
            raise NotReady(f"the provider {self.settings.issuer} does not answer: {error}") from error
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise Unauthorized("the provider's answer has no ID token")
        return token

    def _checked(self, facts: _Facts, token: str, login: LoginTry) -> dict[str, Any]:
        rules = jwt.JWTClaimsRegistry(
            leeway=CLOCK_SECONDS,
            iss={"essential": True, "value": facts.document["issuer"]},
            aud={"essential": True, "value": self.settings.client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": login.nonce},
        )
        try:
            claims: dict[str, Any] = jwt.decode(token, facts.keys, algorithms=list(ALGORITHMS)).claims
            rules.validate(claims)
        except (JoseError, ValueError) as error:
            self._facts = None  # its keys may have changed
            raise Unauthorized(f"the ID token is not valid: {error}") from error
        parties = claims["aud"]
        if isinstance(parties, list) and len(parties) > 1 and claims.get("azp") != self.settings.client_id:
            raise Unauthorized("the ID token is for another client")
        return claims

    def _role(self, claims: dict[str, Any]) -> Role | None:
        if self.settings.role_claim is None:
            return None
        found: Any = claims
        for part in self.settings.role_claim.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        named = found if isinstance(found, list) else [found]
        roles = [role for role in Role if str(role) in named or f"funitel-{role}" in named]
        return roles[-1] if roles else None

    def _client(self, login: LoginTry) -> Any:
        return AsyncOAuth2Client(
            self.settings.client_id,
            self.settings.client_secret,
            scope=SCOPE,
            redirect_uri=login.redirect_url,
            code_challenge_method="S256",
            token_endpoint_auth_method="none" if self.settings.client_secret is None else "client_secret_basic",
            timeout=TIMEOUT_SECONDS,
        )

    async def _provider(self) -> _Facts:
        async with self._reading:
            if self._facts is None or time.monotonic() > self._facts.until:
                self._facts = await self._read()
            return self._facts

    async def _read(self) -> _Facts:
        issuer = self.settings.issuer
        try:
            async with AsyncClient(timeout=TIMEOUT_SECONDS) as client:
                document = (await client.get(f"{issuer.rstrip('/')}{DISCOVERY}")).raise_for_status().json()
                if document.get("issuer", "").rstrip("/") != issuer.rstrip("/"):
                    raise NotReady(f"the provider at {issuer} says that its issuer is {document.get('issuer')!r}")
                keys = (await client.get(document["jwks_uri"])).raise_for_status().json()
            for name in ("authorization_endpoint", "token_endpoint"):
                document[name]
            return _Facts(document, KeySet.import_key_set(keys), time.monotonic() + FACTS_SECONDS)
        except (HTTPError, JoseError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise NotReady(f"the provider {issuer} does not answer as one of OpenID Connect: {error!r}") from error
