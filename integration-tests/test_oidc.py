"""Log in at a provider of OpenID Connect: npm's `oidc-provider`, as a browser does, and one whose tokens are wrong."""

import base64
import hashlib
import hmac
import html
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from funitel_testing import debian, npm
from funitel_testing.fleet import Fleet
from funitel_testing.servers import PLAIN, free_port, wait_until

SCRIPTS = Path(__file__).parent / "oidc"
CLIENT = "funitel tests"
SECRET = "a+secret/of=100%: x"  # the standard has it percent-encoded
ROLE_CLAIM = "realm_access.roles"
LOGIN, CALLBACK, SESSION = "/v1/auth/oidc/login", "/v1/auth/oidc/callback", "/v1/auth/session"
SESSION_COOKIE, TRY_COOKIE = "funitel_session", "funitel_login"
CONSOLE = "/ui/"
CSRF = "x-funitel-csrf"
SECONDS = 30.0
START_SECONDS = 30.0
NUM_REDIRECTS = 10
PEOPLE: dict[str, dict[str, Any]] = {
    "id-ann": {"preferred_username": "ann", "realm_access": {"roles": ["offline_access", "funitel-operator"]}},
    "id-bea": {"preferred_username": "bea", "realm_access": {"roles": ["emperor"]}},
    "id-cid": {"email": "cid@example.org"},
    "id-dan": {"preferred_username": "dan"},
    "id-eve": {"preferred_username": "eve", "realm_access": {"roles": ["admin"]}},
    "id-fay": {"preferred_username": "fay"},
    "id-gil": {"preferred_username": "gil"},
    "id-root": {"preferred_username": "root"},
}


# The server -----------------------------------------------------------------------------------------------------


class Console:
    """A server without a model, and browsers at it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.url = fleet.url

    @contextmanager
    def browser(self) -> Iterator[httpx.Client]:
        """A client with cookies, which follows redirects where it is told to."""
        with httpx.Client(base_url=self.url, verify=PLAIN, timeout=SECONDS) as client:
            yield client

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask by the control socket, as an admin."""
        transport = httpx.HTTPTransport(uds=str(self._socket()))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=SECONDS) as client:
            answer = client.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def _socket(self) -> Path:
        words = Path(f"/proc/{self.fleet.router_pid()}/cmdline").read_bytes().split(b"\0")
        return Path(os.fsdecode(next(word for word in words if b"control.sock" in word)))

    def user(self, name: str) -> dict[str, Any]:
        """One user."""
        found: dict[str, Any] = self.ask("GET", f"/v1/users/{name}")
        return found


@contextmanager
def console(folder: Path, issuer: str, *flags: str, port: int | None = None) -> Iterator[Console]:
    """A server whose users log in at a provider; its log has no traceback at the end."""
    oidc = ("--oidc-issuer", issuer, "--oidc-client-id", CLIENT)
    with Fleet(folder, "--hostname", "127.0.0.1", "--users", *oidc, *flags, port=port) as fleet:
        yield Console(fleet)
        assert "Traceback" not in fleet.log.read_text()


def user_of(browser: httpx.Client) -> dict[str, Any] | None:
    """The user of the browser's session."""
    user: dict[str, Any] | None = browser.get(SESSION).json()["user"]
    return user


def check_refused(browser: httpx.Client, answer: httpx.Response, status: int, *words: str) -> None:
    """A login is refused by one line, and the browser has no session."""
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]
    message = message["message"] if isinstance(message, dict) else message
    assert message.isprintable()
    assert 10 < len(message) < 400
    assert all(word in message for word in words), message
    assert SESSION_COOKIE not in answer.headers.get("set-cookie", "")
    assert user_of(browser) is None


# npm's `oidc-provider` ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the provider, installed by npm; node comes from Debian where that is possible."""
    with suppress(debian.CannotInstall):  # the test is skipped then
        debian.install({"node": "nodejs", "npm": "npm"})
    return npm.install(SCRIPTS, tmp_path_factory.mktemp("npm") / "oidc")


@pytest.fixture(scope="module")
def real(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A server at a real provider, which knows its secret and takes no code without PKCE."""
    folder = tmp_path_factory.mktemp("oidc")
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    port, own_port = free_port(), free_port()
    redirect = f"http://127.0.0.1:{own_port}{CALLBACK}"
    given = {"port": port, "client": CLIENT, "secret": SECRET, "redirect": redirect, "people": PEOPLE}
    log = folder / "provider.log"
    with log.open("wb") as out:
        command = ["node", "provider.mjs", json.dumps(given)]
        process = subprocess.Popen(command, cwd=package, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "listening" in log.read_text(), START_SECONDS, "the provider does not start")
        flags = ("--oidc-client-secret-file", str(secret), "--oidc-role-claim", ROLE_CLAIM)
        with console(folder, f"http://127.0.0.1:{port}", *flags, port=own_port) as running:
            running.ask("POST", "/v1/users", {"name": "root", "role": "admin", "password": "correct horse battery"})
            yield running
    finally:
        process.kill()
        process.wait()


def next_of(browser: httpx.Client, answer: httpx.Response, person: str) -> httpx.Response:
    """What a browser does with a page of the provider: it follows a redirect, or a person submits the form."""
    if answer.is_redirect:
        assert answer.next_request is not None
        return browser.send(answer.next_request)
    assert answer.status_code == 200, answer.text
    form = re.search(r'<form[^>]* action="([^"]+)"', answer.text)
    prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)
    assert form is not None, answer.text
    assert prompt is not None, answer.text
    fields = {"prompt": prompt[1], "login": person, "password": "any"}
    return browser.post(html.unescape(form[1]), data=fields)


def callback_of(console: Console, browser: httpx.Client, person: str) -> str:
    """Go to the provider and log in there; returns the URL of the server to which the provider sends the browser."""
    answer = browser.get(LOGIN)
    assert answer.status_code == 303, answer.text
    for _ in range(NUM_REDIRECTS):
        target: str = answer.headers.get("location", "")
        if target.startswith(f"{console.url}{CALLBACK}"):
            return target
        answer = next_of(browser, answer, person)
    raise AssertionError(f"the provider does not send the browser back: {answer.status_code} {answer.text[:500]}")


def log_in(console: Console, browser: httpx.Client, person: str) -> httpx.Response:
    """Log in; returns the answer to the callback."""
    return browser.get(callback_of(console, browser, person))


def test_a_login_begins_a_session_with_the_role_of_the_claim(real: Console) -> None:
    with real.browser() as browser:
        begun = browser.get(LOGIN)
        query = parse_qs(urlsplit(begun.headers["location"]).query)
        assert query["response_type"] == ["code"]
        assert query["code_challenge_method"] == ["S256"]
        assert query["redirect_uri"] == [f"{real.url}{CALLBACK}"]
        assert all(len(query[name][0]) >= 32 for name in ("state", "nonce", "code_challenge"))
        flags = begun.headers["set-cookie"].lower()
        assert all(flag in flags for flag in ("httponly", "samesite=lax", f"path={CALLBACK}")), flags
        answer = log_in(real, browser, "id-ann")
        assert (answer.status_code, answer.headers["location"]) == (303, CONSOLE), answer.text
        assert answer.headers["cache-control"] == "no-store"
        (cookie,) = [each for each in answer.headers.get_list("set-cookie") if each.startswith(f"{SESSION_COOKIE}=")]
        assert all(flag in cookie.lower() for flag in ("httponly", "samesite=strict", "path=/;")), cookie
        assert TRY_COOKIE not in [each.name for each in browser.cookies.jar]
        assert browser.get(CONSOLE).status_code == 200
        state = browser.get(SESSION).json()
        assert (state["user"]["name"], state["user"]["role"]) == ("ann", "operator")
        assert state["user"]["has_password"] is False
        assert state["user"]["subject"].endswith(" id-ann")
        made = browser.post("/v1/keys", json={"name": "laptop"}, headers={CSRF: state["csrf_token"]})
        assert made.status_code in (200, 201), made.text
    with real.browser() as browser:  # who is known is no new user
        log_in(real, browser, "id-ann")
        assert (user_of(browser) or {})["name"] == "ann"
    rows = real.ask("GET", "/v1/audit?object=session of ann")["audit"]
    assert [row["action"] for row in rows] == ["log in"] * 2


@pytest.mark.parametrize(
    ("person", "name", "role"),
    [("id-bea", "bea", "user"), ("id-cid", "cid@example.org", "user"), ("id-eve", "eve", "admin")],
    ids=["an unknown role", "no role", "admin"],
)
def test_a_role_that_is_not_ours_is_the_least_one(real: Console, person: str, name: str, role: str) -> None:
    with real.browser() as browser:
        assert log_in(real, browser, person).status_code == 303
        user = user_of(browser) or {}
        assert (user["name"], user["role"]) == (name, role)


def test_the_last_admin_stays_one_and_is_let_in(real: Console) -> None:
    """A wrong table of roles at the provider must not lock everybody out."""
    with real.browser() as browser:
        assert log_in(real, browser, "id-gil").status_code == 303
        real.ask("PATCH", "/v1/users/gil", {"role": "admin"})
        admins = [user["name"] for user in real.ask("GET", "/v1/users")["users"] if user["role"] == "admin"]
        others = [name for name in admins if name != "gil"]
        for name in others:
            real.ask("PATCH", f"/v1/users/{name}", {"role": "user"})
        try:
            assert log_in(real, browser, "id-gil").status_code == 303
            assert (user_of(browser) or {})["role"] == "admin"
        finally:
            for name in others:
                real.ask("PATCH", f"/v1/users/{name}", {"role": "admin"})
        assert log_in(real, browser, "id-gil").status_code == 303
        assert (user_of(browser) or {})["role"] == "user"


def test_who_has_no_role_at_the_provider_any_more_loses_it_here(real: Console) -> None:
    with real.browser() as browser:
        log_in(real, browser, "id-fay")
        real.ask("PATCH", "/v1/users/fay", {"role": "admin"})
        assert (user_of(browser) or {})["role"] == "admin"
        log_in(real, browser, "id-fay")
        assert (user_of(browser) or {})["role"] == "user"


@pytest.mark.parametrize("state", ["", "of-another-login", None], ids=["empty", "wrong", "absent"])
def test_a_state_of_no_login_is_refused(real: Console, state: str | None) -> None:
    with real.browser() as browser:
        url = httpx.URL(callback_of(real, browser, "id-ann"))
        wrong = url.copy_remove_param("state") if state is None else url.copy_set_param("state", state)
        check_refused(browser, browser.get(wrong), 401, "no login")


def test_another_browser_cannot_end_a_login(real: Console) -> None:
    """Neither one that has begun none, nor one that has begun another, nor one with a cookie that is not signed."""
    with real.browser() as browser, real.browser() as other:
        url = callback_of(real, browser, "id-ann")
        check_refused(other, other.get(url), 401, "has begun no login")
        other.get(LOGIN)
        check_refused(other, other.get(url), 401, "no login")
        forged = browser.cookies[TRY_COOKIE][:-4] + "AAAA"
        check_refused(other, other.get(url, headers={"cookie": f"{TRY_COOKIE}={forged}"}), 401, "has begun no login")
        assert browser.get(url).status_code == 303


def test_a_callback_is_taken_once(real: Console) -> None:
    with real.browser() as browser, real.browser() as thief:
        url = callback_of(real, browser, "id-ann")
        begun = browser.cookies[TRY_COOKIE]
        assert browser.get(url).status_code == 303
        check_refused(thief, thief.get(url, headers={"cookie": f"{TRY_COOKIE}={begun}"}), 401, "refuses")
        check_refused(thief, thief.get(url), 401, "has begun no login")


def test_a_code_of_another_login_is_refused(real: Console) -> None:
    """A code that was stolen is worth nothing: it was given for another verifier and another nonce."""
    with real.browser() as browser, real.browser() as thief:
        stolen = httpx.URL(callback_of(real, browser, "id-ann")).params["code"]
        own = httpx.URL(callback_of(real, thief, "id-dan")).copy_set_param("code", stolen)
        check_refused(thief, thief.get(own), 401, "refuses")


def test_a_callback_without_a_code_and_one_with_an_error_are_refused(real: Console) -> None:
    with real.browser() as browser:
        url = httpx.URL(callback_of(real, browser, "id-ann"))
        check_refused(browser, browser.get(url.copy_remove_param("code")), 401, "code")
        failed = url.copy_remove_param("code").copy_set_param("error", "access_denied\r\nset-cookie: a=b")
        check_refused(browser, browser.get(failed), 401, "access_denied")
        foreign = failed.copy_set_param("state", "of-another-login")
        check_refused(browser, browser.get(foreign), 401, "no login")


def test_a_person_that_aborts_at_the_provider_is_told_so(real: Console) -> None:
    with real.browser() as browser:
        page = browser.get(LOGIN, follow_redirects=True)
        abort = re.search(r'href="([^"]+/abort)"', page.text)
        assert abort is not None, page.text
        check_refused(browser, browser.get(html.unescape(abort[1]), follow_redirects=True), 401, "access_denied")


def test_a_user_that_is_disabled_is_refused(real: Console) -> None:
    with real.browser() as browser:
        assert log_in(real, browser, "id-dan").status_code == 303
        real.ask("PATCH", "/v1/users/dan", {"is_disabled": True})
        wait_until(lambda: user_of(browser) is None, SECONDS)
        check_refused(browser, log_in(real, browser, "id-dan"), 401, "disabled")
        real.ask("PATCH", "/v1/users/dan", {"is_disabled": False})
        assert log_in(real, browser, "id-dan").status_code == 303


def test_a_user_that_is_deleted_begins_anew(real: Console) -> None:
    """The person is a new user, to whom no key of the old one belongs."""
    with real.browser() as browser:
        assert log_in(real, browser, "id-bea").status_code == 303
        real.ask("PATCH", "/v1/users/bea", {"limits": {"requests_per_minute": 7}})
        key = real.ask("POST", "/v1/keys", {"user": "bea", "name": "old"})["key"]
        real.ask("DELETE", "/v1/users/bea")
        wait_until(lambda: user_of(browser) is None, SECONDS)
    with real.browser() as browser:
        assert log_in(real, browser, "id-bea").status_code == 303
        assert (user_of(browser) or {})["limits"]["requests_per_minute"] is None
        asked = httpx.get(f"{real.url}/v1/keys", headers={"authorization": f"Bearer {key}"}, verify=PLAIN)
        assert asked.status_code == 401


def test_a_user_with_a_password_is_not_taken_over_by_name(real: Console) -> None:
    with real.browser() as browser:
        check_refused(browser, log_in(real, browser, "id-root"), 409, "root")
    refused = real.ask("GET", "/v1/audit?actor=oidc")["audit"][0]
    assert (refused["action"], refused["object"], refused["status"]) == ("log in", "session", 409)
    assert refused["address"] == "127.0.0.1"
    assert real.user("root")["subject"] is None


def test_a_login_does_not_keep_a_session_that_was_there(real: Console) -> None:
    with real.browser() as browser, real.browser() as victim:
        log_in(real, browser, "id-ann")
        fixed = browser.cookies[SESSION_COOKIE]
        first = browser.get(SESSION).json()["csrf_token"]
        victim.cookies.set(SESSION_COOKIE, fixed)
        answer = log_in(real, victim, "id-eve")
        assert answer.cookies[SESSION_COOKIE] != fixed
        assert (user_of(browser) or {})["name"] == "ann"
        log_in(real, browser, "id-ann")
        assert browser.cookies[SESSION_COOKIE] != fixed
        assert browser.get(SESSION).json()["csrf_token"] != first


@pytest.mark.parametrize("name", ["next", "return_to", "redirect", "redirect_uri", "url"])
def test_a_login_leads_to_the_console_alone(real: Console, name: str) -> None:
    with real.browser() as browser:
        foreign = {name: "https://elsewhere.example/"}
        begun = browser.get(LOGIN, params=foreign)
        assert "elsewhere" not in begun.headers["location"]
        url = httpx.URL(callback_of(real, browser, "id-ann"))
        answer = browser.get(url.copy_merge_params(foreign))
        assert answer.headers["location"] == CONSOLE


def test_the_provider_sends_nobody_to_another_host(real: Console) -> None:
    """Without --oidc-redirect-url the address that the provider sends a browser to has the `Host` of the request."""
    with real.browser() as browser:
        begun = browser.get(LOGIN, headers={"host": "elsewhere.example"})
        assert "elsewhere.example" in begun.headers["location"]
        refused = browser.get(begun.headers["location"])
        assert refused.status_code == 400
        assert "redirect_uri" in refused.text


# A provider whose answers are wrong -----------------------------------------------------------------------------


def _text(content: Any) -> str:
    """JSON as a part of a token."""
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


class Wrong(ThreadingHTTPServer):
    """A provider that accepts everyone, and does as a test says.

    Attributes:
        person: claims beside those of the protocol.
        claims: instead of the right ones; None for one that is left out.
        answers: path to a status and a body, instead of the right ones.
        key: that signs, with its header.
        published: keys that the provider publishes.
        methods: by which it takes the secret of a client.
        seen: the form of the last request for a token.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.issuer = f"http://127.0.0.1:{self.server_address[1]}"
        self.first_key = RSAKey.generate_key(2048, {"kid": "1"})
        self.nonces: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Do everything right."""
        self.person: dict[str, Any] = {"sub": "7", "preferred_username": "gus"}
        self.claims: dict[str, Any] = {}
        self.answers: dict[str, tuple[int, Any]] = {}
        self.key: RSAKey | OctKey | None = self.first_key
        self.header: dict[str, Any] = {"alg": "RS256", "kid": "1"}
        self.published: list[Any] = [self.first_key.as_dict(private=False)]
        self.methods = ["client_secret_basic", "none"]
        self.seen: dict[str, list[str]] = {}

    def answer(self, path: str, form: dict[str, list[str]]) -> tuple[int, Any]:
        """Status and body."""
        if path in self.answers:
            return self.answers[path]
        if path == "/token":
            self.seen = form
            token = self.id_token(form["code"][0])
            return 200, {"access_token": "a", "token_type": "Bearer", "expires_in": 60, "id_token": token}
        if path == "/userinfo":
            return 200, {"sub": self.person["sub"]}
        if path == "/jwks":
            return 200, {"keys": self.published}
        if path == "/.well-known/openid-configuration":
            return 200, {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/jwks",
                "userinfo_endpoint": f"{self.issuer}/userinfo",
                "token_endpoint_auth_methods_supported": self.methods,
            }
        return 404, {}

    def id_token(self, code: str) -> str:
        """A token for a code."""
        now = int(time.time())
        right = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": self.nonces.get(code)}
        claims = {**right, **self.person, **self.claims}
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.key is None:
            return f"{_text(self.header)}.{_text(claims)}."
        return jwt.encode(self.header, claims, self.key, algorithms=[self.header["alg"]])


class _Handler(BaseHTTPRequestHandler):
    server: Wrong

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(parse_qs(self.rfile.read(int(self.headers["content-length"])).decode()))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, form: dict[str, list[str]]) -> None:
        status, body = self.server.answer(urlsplit(self.path).path, form)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def answering(provider: Wrong) -> Iterator[Wrong]:
    """The provider, in a thread."""
    thread = threading.Thread(target=provider.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield provider
    finally:
        provider.shutdown()
        thread.join()
        provider.server_close()


@pytest.fixture(scope="module")
def provider() -> Iterator[Wrong]:
    """A provider whose answers are wrong."""
    with answering(Wrong()) as running:
        yield running


@pytest.fixture(scope="module")
def server(provider: Wrong, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A server at that provider, as a public client, with a claim whose name is a URL, and an address of its own."""
    port = free_port()
    flags = ("--oidc-role-claim", "https://x.example/r", "--oidc-redirect-url", f"http://127.0.0.1:{port}{CALLBACK}")
    with console(tmp_path_factory.mktemp("wrong"), provider.issuer, *flags, port=port) as running:
        yield running


@pytest.fixture
def wrong(provider: Wrong) -> Wrong:
    """The provider, which does everything right until a test says otherwise."""
    provider.reset()
    return provider


def come_back(provider: Wrong, browser: httpx.Client, *, nonce: str | None = None) -> httpx.Response:
    """Begin a login, and come back from the provider with a code."""
    begun = browser.get(LOGIN)
    assert begun.status_code == 303, begun.text
    query = parse_qs(urlsplit(begun.headers["location"]).query)
    code = f"code-{len(provider.nonces)}"
    provider.nonces[code] = nonce or query["nonce"][0]
    answer = browser.get(CALLBACK, params={"state": query["state"][0], "code": code})
    if provider.seen:  # the verifier of PKCE is that of the challenge
        digest = hashlib.sha256(provider.seen["code_verifier"][0].encode()).digest()
        assert query["code_challenge"][0] == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        assert provider.seen["client_id"] == [CLIENT]
    return answer


def test_right_tokens_are_taken(server: Console, wrong: Wrong) -> None:
    """Also one for two parties, which names this one, and one of a clock that is a little late."""
    roles = {"https://x.example/r": ["operator"]}
    now = int(time.time())
    for claims in ({}, roles, {"aud": [CLIENT, "other"], "azp": CLIENT}, {"exp": now - 20}, {"aud": [CLIENT]}):
        wrong.claims = dict(claims)
        with server.browser() as browser:
            answer = come_back(wrong, browser)
            assert answer.status_code == 303, (claims, answer.text)
            user = user_of(browser) or {}
            assert (user["name"], user["role"]) == ("gus", "operator" if claims is roles else "user")


def test_the_address_of_the_settings_is_the_one_that_counts(server: Console, wrong: Wrong) -> None:
    with server.browser() as browser:
        begun = browser.get(LOGIN, headers={"host": "elsewhere.example"})
        assert "elsewhere" not in begun.headers["location"]
        assert parse_qs(urlsplit(begun.headers["location"]).query)["redirect_uri"] == [f"{server.url}{CALLBACK}"]


NOW = int(time.time())
TIMES = (NOW - 3600, NOW + 36000)  # in names of tests less NOW: all processes collect the same names


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "of another login"},
        {"nonce": None},
        {"aud": "another client"},
        {"aud": ["another client"]},
        {"aud": [CLIENT, "other"]},
        {"aud": [CLIENT, "other"], "azp": "other"},
        {"aud": CLIENT, "azp": "other"},
        {"aud": None},
        {"aud": []},
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"exp": NOW - 3600},
        {"exp": None},
        {"exp": "tomorrow"},
        {"exp": True},
        {"iat": NOW + 36000},
        {"nbf": NOW + 36000},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
    ],
    ids=lambda claims: str({name: value - NOW if value in TIMES else value for name, value in claims.items()}),
)
def test_an_id_token_with_a_wrong_claim_is_refused(server: Console, wrong: Wrong, claims: dict[str, Any]) -> None:
    wrong.claims = claims
    with server.browser() as browser:
        check_refused(browser, come_back(wrong, browser), 401, "ID token")


def test_an_id_token_of_an_earlier_login_is_refused(server: Console, wrong: Wrong) -> None:
    with server.browser() as browser:
        begun = browser.get(LOGIN)
        nonce = parse_qs(urlsplit(begun.headers["location"]).query)["nonce"][0]
        check_refused(browser, come_back(wrong, browser, nonce=nonce), 401, "nonce")


@pytest.mark.parametrize(
    "how",
    [
        *("unpublished key", "unpublished key id", "none", "none in other letters"),
        *("secret", "public key as secret", "algorithm of another kind of key", "unknown algorithm"),
    ],
)
def test_an_id_token_that_is_not_signed_by_the_provider_is_refused(server: Console, wrong: Wrong, how: str) -> None:
    match how:
        case "unpublished key":
            wrong.key = RSAKey.generate_key(2048, {"kid": "1"})
        case "unpublished key id":
            wrong.key = RSAKey.generate_key(2048, {"kid": "2"})
            wrong.header = {"alg": "RS256", "kid": "2"}
        case "none" | "none in other letters":
            wrong.key, wrong.header = None, {"alg": "none" if how == "none" else "nOnE", "kid": "1"}
        case "algorithm of another kind of key" | "unknown algorithm":
            wrong.key, wrong.header = None, {"alg": "ES256" if how.startswith("algorithm") else "XS256", "kid": "1"}
        case "secret":
            wrong.key, wrong.header = OctKey.import_key(CLIENT.ljust(32)), {"alg": "HS256", "kid": "1"}
        case _:
            public = wrong.first_key.as_pem(private=False)
            wrong.key, wrong.header = None, {"alg": "HS256", "kid": "1"}
            wrong.answers["/token"] = (200, {"access_token": "a", "id_token": _signed_with(public)})
    with server.browser() as browser:
        check_refused(browser, come_back(wrong, browser), 401, "ID token")


def _signed_with(secret: bytes) -> str:
    """A token that has a secret in the place of a public key; libraries refuse to make one."""
    content = f"{_text({'alg': 'HS256', 'kid': '1'})}.{_text({'sub': '7'})}"
    signature = hmac.new(secret, content.encode(), hashlib.sha256).digest()
    return f"{content}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize("token", [None, "", "a", "a.b.c", 7, "." * 10], ids=str)
def test_what_is_no_id_token_is_refused(server: Console, wrong: Wrong, token: Any) -> None:
    wrong.answers["/token"] = (200, {"access_token": "a", "id_token": token})
    with server.browser() as browser:
        check_refused(browser, come_back(wrong, browser), 401, "ID token")


@pytest.mark.parametrize("has_id", [True, False])
def test_a_new_key_of_the_provider_is_taken_at_once(server: Console, wrong: Wrong, has_id: bool) -> None:
    with server.browser() as browser:
        assert come_back(wrong, browser).status_code == 303
        key = RSAKey.generate_key(2048, {"kid": "next"} if has_id else None)
        unknown = {"kty": "AKP", "kid": "later", "alg": "ML-DSA-44", "pub": "AAAA"}
        bent = {"kty": "EC", "kid": "bent", "crv": "P-000", "x": "AA", "y": "AA"}
        wrong.published = [key.as_dict(private=False)] + ([unknown, bent] if has_id else [])
        wrong.key, wrong.header = key, {"alg": "RS256", **({"kid": "next"} if has_id else {})}
        answer = come_back(wrong, browser)
        assert answer.status_code == 303, answer.text


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((200, {"sub": "8", "https://x.example/r": "admin"}), 401, "another"),
        ((200, {"https://x.example/r": "admin"}), 401, "another"),
        ((200, b"a.signed.token"), 503, "does not answer"),
        ((401, {"error": "invalid_token"}), 503, "does not answer"),
    ],
    ids=str,
)
def test_a_wrong_answer_about_the_user_is_refused(
    server: Console, wrong: Wrong, answer: tuple[int, Any], status: int, words: str
) -> None:
    wrong.answers["/userinfo"] = answer
    with server.browser() as browser:
        check_refused(browser, come_back(wrong, browser), status, words)


def test_a_claim_of_the_token_counts_before_the_answer_about_the_user(server: Console, wrong: Wrong) -> None:
    wrong.person |= {"preferred_username": None, "https://x.example/r": "user"}
    wrong.answers["/userinfo"] = (200, {"sub": "7", "name": "Gus", "https://x.example/r": "admin"})
    with server.browser() as browser:
        assert come_back(wrong, browser).status_code == 303
        assert (user_of(browser) or {})["role"] == "user"


# A provider that does not answer --------------------------------------------------------------------------------

BROKEN = [
    (500, {"error": "server_error"}),
    (503, b"<html>busy</html>"),
    (200, b"<html>maintenance</html>"),
    (200, b"[]"),
    (200, b"\xff"),
    (404, b"no such page"),
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_token_endpoint_that_is_broken_is_told(server: Console, wrong: Wrong, broken: tuple[int, Any]) -> None:
    wrong.answers["/token"] = broken
    with server.browser() as browser:
        check_refused(browser, come_back(wrong, browser), 503, wrong.issuer)


def test_a_refusal_by_the_provider_is_one_line(server: Console, wrong: Wrong) -> None:
    for error in ("invalid_grant", "two\nlines " + "x" * 5000, ["no text"]):
        wrong.answers["/token"] = (400, {"error": error})
        with server.browser() as browser:
            check_refused(browser, come_back(wrong, browser), 401, "refuses")


def test_a_provider_that_goes_down_and_comes_back(tmp_path: Path) -> None:
    """The server starts without it, says so at each login, and goes on without a restart."""
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    flags = ("--oidc-client-secret-file", str(secret))
    with console(tmp_path, issuer, *flags) as server, server.browser() as browser:
        check_refused(browser, browser.get(LOGIN), 503, issuer)
        with answering(Wrong(port)) as provider:
            discovery = "/.well-known/openid-configuration"
            _, right = provider.answer(discovery, {})
            for path, answer in (
                (discovery, (500, b"")),
                (discovery, (200, b"<html>")),
                (discovery, (200, [])),
                (discovery, (200, {"issuer": issuer})),
                (discovery, (200, right | {"issuer": "https://elsewhere.example"})),
                (discovery, (200, right | {"issuer": 7})),
                (discovery, (200, right | {"jwks_uri": "http://["})),
                (discovery, (200, right | {"token_endpoint": None})),
                ("/jwks", (200, {"keys": []})),
                ("/jwks", (200, {"keys": "none"})),
                ("/jwks", (200, {"keys": [{"kty": "RSA"}, {"kty": ["RSA"]}, {"kty": "oct", "k": "AAAA"}, 7]})),
                ("/jwks", (404, b"")),
            ):
                provider.answers = {path: answer}
                begun = browser.get(LOGIN)
                assert begun.status_code == 503, (path, answer)
                check_refused(browser, begun, 503, issuer)
            provider.reset()
            provider.methods = ["client_secret_post"]
            assert come_back(provider, browser).status_code == 303
            assert provider.seen["client_secret"] == [SECRET]
            assert (user_of(browser) or {})["name"] == "gus"
        with server.browser() as other:
            begun = other.get(LOGIN)  # the addresses of the provider are known
            assert begun.status_code == 303
            state = parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]
            check_refused(other, other.get(CALLBACK, params={"state": state, "code": "c"}), 503, issuer)
