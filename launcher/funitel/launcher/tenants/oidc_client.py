"""A client of a provider of OpenID Connect: the authorization code flow with PKCE, and the ID token's checks.

Addresses for browsers are made by Authlib, requests by httpx, tokens are checked by joserfc: the extra `oidc`. The
client of Authlib is not used: where httpx2 is installed it raises the errors of httpx2.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from httpx import AsyncClient, BasicAuth, HTTPError, InvalidURL, Response
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet, import_key

from funitel.launcher.tenants.oidc import Identity, LoginTry, OidcSettings
from funitel.proto.errors import NotReady, Unauthorized
from funitel.proto.printable import printable, shortened
from funitel.proto.security.roles import Role

SCOPE = "openid profile email"
DISCOVERY = "/.well-known/openid-configuration"
TIMEOUT_SECONDS = 10.0
FACTS_SECONDS = 3600.0  # that the provider's keys and addresses are kept
CLOCK_SECONDS = 60  # by which the clocks of two machines may differ
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
KEY_TYPES = ("RSA", "EC", "OKP")  # of public keys
MAX_WORDS = 200  # characters of the provider's in a message
_NAMES = ("preferred_username", "email", "name")  # claims that name a person, the best one first
_BASIC, _POST = "client_secret_basic", "client_secret_post"
_NO_ANSWER = (HTTPError, InvalidURL, ValueError, KeyError, AttributeError, TypeError)


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
        url = prepare_grant_uri(
            facts.document["authorization_endpoint"],
            client_id=self.settings.client_id,
            response_type="code",
            redirect_uri=login.redirect_url,
            scope=SCOPE,
            state=login.state,
            nonce=login.nonce,
            code_challenge=create_s256_code_challenge(login.verifier),
            code_challenge_method="S256",
        )
        return str(url)

    async def identity(self, login: LoginTry, code: str) -> Identity:
        """The person that a code of the provider stands for.

        Raises:
            Unauthorized: code or token are wrong.
            NotReady: the provider does not answer.
        """
        facts = await self._provider()
        answer = await self._answer(facts, login, code)
        claims = await self._checked(facts, answer.get("id_token"), login)
        person = await self._person(facts, answer.get("access_token"), claims)
        return Identity(
            subject=f"{claims['iss']} {claims['sub']}",
            name=str(next((person[name] for name in _NAMES if person.get(name)), claims["sub"])),
            role=self._role(person),
        )

    async def _answer(self, facts: _Facts, login: LoginTry, code: str) -> dict[str, Any]:
        """What the provider gives for a code."""
        id, secret = self.settings.client_id, self.settings.client_secret
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": login.redirect_url,
            "code_verifier": login.verifier,
        }
        basic = None
        if secret is None:
            form |= {"client_id": id}
        elif self._takes_secret_in_form(facts):
            form |= {"client_id": id, "client_secret": secret}
        else:
            basic = BasicAuth(quote_plus(id), quote_plus(secret))  # RFC 6749, section 2.3.1
        try:
            async with AsyncClient(timeout=TIMEOUT_SECONDS, auth=basic) as client:
                response = await client.post(facts.document["token_endpoint"], data=form)
            if response.is_server_error:
                response.raise_for_status()
            answer = _object_of(response)
            if "error" not in answer:
                response.raise_for_status()
        except _NO_ANSWER as error:
            raise self._no_answer(error) from error
        if "error" in answer:
            raise Unauthorized(f"the provider refuses the code: {_words(answer['error'])}")
        return answer

    def _takes_secret_in_form(self, facts: _Facts) -> bool:
        """Whether the provider takes the secret in the form only; the header is what the standard has for all."""
        methods = facts.document.get("token_endpoint_auth_methods_supported")
        return isinstance(methods, list) and _POST in methods and _BASIC not in methods

    async def _checked(self, facts: _Facts, token: Any, login: LoginTry) -> dict[str, Any]:
        """The claims of an ID token."""
        if not isinstance(token, str):
            raise Unauthorized("the provider's answer has no ID token")
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
            try:
                claims = _decoded(token, facts.keys)
            except (InvalidKeyIdError, BadSignatureError):
                facts = await self._provider(instead_of=facts)  # it may have a new key
                claims = _decoded(token, facts.keys)
            rules.validate(claims)
        except (JoseError, ValueError) as error:
            raise Unauthorized(f"the ID token is not valid: {_words(error)}") from error
        if not isinstance(claims["sub"], str):  # joserfc checks the types of claims since 1.8
            raise Unauthorized("the ID token is not valid: the claim sub is no text")
        party, is_one_of_many = claims.get("azp"), isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if party != self.settings.client_id and (is_one_of_many or party is not None):
            raise Unauthorized("the ID token is for another client")
        return claims

    async def _person(self, facts: _Facts, access_token: Any, claims: dict[str, Any]) -> dict[str, Any]:
        """The claims of an ID token, with those that the provider gives elsewhere, as many do, where one is missing."""
        url, role = facts.document.get("userinfo_endpoint"), self.settings.role_claim
        has_all = any(claims.get(name) for name in _NAMES) and (role is None or _claim(claims, role) is not None)
        if has_all or url is None or not isinstance(access_token, str):
            return claims
        try:
            headers = {"authorization": f"Bearer {access_token}"}
            async with AsyncClient(timeout=TIMEOUT_SECONDS) as client:
                found = _object_of((await client.get(url, headers=headers)).raise_for_status())
        except _NO_ANSWER as error:
            raise self._no_answer(error) from error
        if found.get("sub") != claims["sub"]:
            raise Unauthorized("the provider's answer about the user is about another one")
        return found | claims

    def _role(self, person: dict[str, Any]) -> Role | None:
        """The greatest of our roles in the claim of roles, the least one where there is none."""
        if self.settings.role_claim is None:
            return None
        found = _claim(person, self.settings.role_claim)
        named = found if isinstance(found, list) else [found]
        return [role for role in Role if role is Role.USER or str(role) in named or f"funitel-{role}" in named][-1]

    async def _provider(self, instead_of: _Facts | None = None) -> _Facts:
        async with self._reading:
            if self._facts is None or self._facts is instead_of or time.monotonic() > self._facts.until:
                self._facts = await self._read()
            return self._facts

    async def _read(self) -> _Facts:
        issuer = self.settings.issuer
        try:
            async with AsyncClient(timeout=TIMEOUT_SECONDS) as client:
                document = _object_of((await client.get(f"{issuer.rstrip('/')}{DISCOVERY}")).raise_for_status())
                if document["issuer"].rstrip("/") != issuer.rstrip("/"):
                    raise NotReady(f"the provider at {issuer} says that its issuer is {_words(document['issuer'])}")
                keys = _object_of((await client.get(document["jwks_uri"])).raise_for_status())
            for name in ("authorization_endpoint", "token_endpoint"):
                if not isinstance(document[name], str):
                    raise ValueError(f"{name} is no text")
            return _Facts(document, _key_set(keys), time.monotonic() + FACTS_SECONDS)
        except _NO_ANSWER as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> NotReady:
        why = f"{type(error).__name__}: {_words(error)}"
        return NotReady(f"the provider {self.settings.issuer} does not answer as one of OpenID Connect: {why}")


def _object_of(response: Response) -> dict[str, Any]:
    """The JSON object of an answer; raises ValueError for what is none."""
    content = response.json()
    if not isinstance(content, dict):
        raise ValueError("the answer is no JSON object")
    return content


def _key_set(document: dict[str, Any]) -> KeySet:
    """The keys that we can use; raises ValueError where there is none."""
    keys = []
    for each in document["keys"]:
        if not isinstance(each, dict) or each.get("kty") not in KEY_TYPES:
            continue
        try:
            keys.append(import_key(each))
        except (JoseError, ValueError, KeyError, TypeError):
            continue  # of a curve that we do not know, or malformed: RFC 7517, section 5
    if not keys:
        raise ValueError("it publishes no key")
    return KeySet(keys)


def _decoded(token: str, keys: KeySet) -> dict[str, Any]:
    claims: dict[str, Any] = jwt.decode(token, keys, algorithms=list(ALGORITHMS)).claims
    return claims


def _claim(claims: dict[str, Any], name: str) -> Any:
    """A claim by its name, or by a path of names with dots between; None where it is missing."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _words(text: object) -> str:
    """Words of the provider's, or of a library, as one line."""
    return shortened(printable(" ".join(str(text).split())), MAX_WORDS)
