"""Routes of sessions: log in with a password or at a provider of OpenID Connect, look, log out."""

from dataclasses import asdict
from typing import Any

from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from funitel.launcher.control_plane.api.requests import json_of
from funitel.launcher.control_plane.checks import Fields
from funitel.launcher.tenants.api.requests import actor_of, tenants_of
from funitel.launcher.tenants.oidc import TRY_SECONDS, Identity, LoginTry, OidcProvider
from funitel.launcher.tenants.records import User
from funitel.launcher.tenants.service import Tenants
from funitel.proto.errors import FunitelError, NotFound, Unauthorized
from funitel.proto.printable import printable
from funitel.proto.security.asker import CLIENT, ORIGIN
from funitel.proto.security.sessions import COOKIE, MAX_AGE_SECONDS, SECURE_COOKIE, Session

TRY_COOKIE = "funitel_login"
_TRY_SALT = "funitel oidc login"
CALLBACK = "/v1/auth/oidc/callback"
CONSOLE = "/ui/"
SECURE = "https://"
MAX_ERROR_CHARACTERS = 200


async def log_in(request: Request) -> Response:
    """Begin a session by name and password."""
    given = Fields(await json_of(request))
    name, password = given.required("name"), given.required_secret("password")
    given.finish()
    tenants = tenants_of(request)
    user, cookie = await tenants.log_in(name, password, request.headers.get(CLIENT, ""))
    session = tenants.signer.session(cookie)
    assert session is not None, "it was signed just now"
    return _with_session(request, JSONResponse(_shown(tenants, user, session)), cookie)


async def look(request: Request) -> Response:
    """The session of the request's cookie: its user, and the token for changes."""
    tenants = tenants_of(request)
    session = _session_of(request, tenants)
    user = tenants.user_of(session)
    of_server = {"has_users": True, "has_oidc": _provider(request) is not None}
    if user is None or session is None:
        return JSONResponse({"user": None, "csrf_token": None, "expires": None} | of_server, headers=_NO_STORE)
    return JSONResponse(_shown(tenants, user, session) | of_server, headers=_NO_STORE)


async def log_out(request: Request) -> Response:
    """End the session of the request's cookie; nothing where it is not valid."""
    tenants = tenants_of(request)
    session = _session_of(request, tenants)
    if session is not None and tenants.user_of(session) is not None:
        await tenants.end_session(actor_of(request), session)
    response = Response(status_code=204)
    response.delete_cookie(_cookie_name(request), path="/", secure=_is_secure(request), httponly=True)
    return response


async def go_to_provider(request: Request) -> Response:
    """Send the browser to the provider."""
    tenants, provider = tenants_of(request), _required_provider(request)
    login = LoginTry.new(provider.settings.redirect_url or f"{_origin(request)}{CALLBACK}")
    response = RedirectResponse(await provider.authorization_url(login), 303, _NO_STORE)
    cookie = _tries(tenants).dumps(asdict(login))
    response.set_cookie(
        TRY_COOKIE, cookie, TRY_SECONDS, path=CALLBACK, secure=_is_secure(request), httponly=True, samesite="lax"
    )
    return response


async def come_back(request: Request) -> Response:
    """Take a browser that comes back from the provider, and begin the session."""
    tenants, provider = tenants_of(request), _required_provider(request)
    try:
        kept = _tries(tenants).loads(request.cookies.get(TRY_COOKIE, ""), max_age=TRY_SECONDS)
    except BadSignature:
        raise Unauthorized("this browser has begun no login here, or too long ago") from None
    login, address = LoginTry(**kept), request.headers.get(CLIENT, "")
    login.check_state(request.query_params.get("state", ""))
    try:
        user = await tenants.user_of_identity(await _identity(provider, login, request.query_params))
    except FunitelError as error:
        await tenants.note_refused(address, error.http_status)
        raise
    cookie = await tenants.begin_session(user, address)
    response = _with_session(request, RedirectResponse(CONSOLE, 303, _NO_STORE), cookie)
    response.delete_cookie(TRY_COOKIE, path=CALLBACK)
    return response


async def _identity(provider: OidcProvider, login: LoginTry, query: QueryParams) -> Identity:
    """The person that the provider names for its answer to the browser."""
    if "error" in query:
        raise Unauthorized(f"the provider refuses the login: {printable(query['error'][:MAX_ERROR_CHARACTERS])}")
    if not query.get("code"):
        raise Unauthorized("the provider's answer has no code")
    return await provider.identity(login, query["code"])


_NO_STORE = {"cache-control": "no-store"}


def _shown(tenants: Tenants, user: User, session: Session) -> dict[str, Any]:
    return {"user": user.to_json(), "csrf_token": tenants.signer.csrf_token(session), "expires": session.expires}


def _with_session(request: Request, response: Response, cookie: str) -> Response:
    """The response with the cookie of a session, which pages of other sites cannot have sent."""
    response.headers["cache-control"] = "no-store"
    response.set_cookie(
        _cookie_name(request),
        cookie,
        MAX_AGE_SECONDS,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )
    return response


def _session_of(request: Request, tenants: Tenants) -> Session | None:
    return tenants.signer.session(request.cookies.get(_cookie_name(request), ""))


def _cookie_name(request: Request) -> str:
    return SECURE_COOKIE if _is_secure(request) else COOKIE


def _is_secure(request: Request) -> bool:
    return _origin(request).startswith(SECURE)


def _origin(request: Request) -> str:
    return request.headers.get(ORIGIN, "http://localhost")


def _tries(tenants: Tenants) -> URLSafeTimedSerializer:
    return tenants.serializer(_TRY_SALT)


def _provider(request: Request) -> OidcProvider | None:
    found: OidcProvider | None = request.app.state.oidc
    return found


def _required_provider(request: Request) -> OidcProvider:
    found = _provider(request)
    if found is None:
        raise NotFound("this server has no provider of OpenID Connect: start it with --oidc-issuer")
    return found


ROUTES = (
    Route("/v1/auth/login", log_in, methods=["POST"]),
    Route("/v1/auth/session", look, methods=["GET"]),
    Route("/v1/auth/logout", log_out, methods=["POST"]),
    Route("/v1/auth/oidc/login", go_to_provider, methods=["GET"]),
    Route(CALLBACK, come_back, methods=["GET"]),
)
