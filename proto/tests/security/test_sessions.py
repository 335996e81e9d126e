"""Roles, and sessions as signed cookies: what is valid, for how long, and that anything else is not."""

import base64
import hashlib
import hmac
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from itsdangerous import URLSafeTimedSerializer

from funitel.proto.security import sessions
from funitel.proto.security.roles import Role
from funitel.proto.security.sessions import (
    COOKIE,
    MAX_AGE_SECONDS,
    MAX_COOKIE_CHARACTERS,
    SECURE_COOKIE,
    Session,
    SessionSigner,
)

SECRET = "a secret of the control plane"
NOW = 1_800_000_000


class Clock:
    """The clock that signs and checks, as a test sets it."""

    def __init__(self) -> None:
        self.now = float(NOW)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
def signer() -> SessionSigner:
    return SessionSigner(SECRET)


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def decoded(text: str) -> Any:
    content = base64.urlsafe_b64decode(text.lstrip(".") + "=" * (-len(text.lstrip(".")) % 4))
    return json.loads(zlib.decompress(content) if text.startswith(".") else content)


def found(signer: SessionSigner, cookie: str) -> Session:
    session = signer.session(cookie)
    assert session is not None
    return session


# Roles


def test_each_role_includes_itself_and_those_before_it() -> None:
    roles = (Role.USER, Role.OPERATOR, Role.ADMIN)
    assert tuple(Role) == roles
    included = {role: [other for other in roles if role.includes(other)] for role in roles}
    assert included == {
        Role.USER: [Role.USER],
        Role.OPERATOR: [Role.USER, Role.OPERATOR],
        Role.ADMIN: [Role.USER, Role.OPERATOR, Role.ADMIN],
    }


def test_a_role_is_read_from_its_exact_name() -> None:
    assert [Role(name) for name in ("user", "operator", "admin")] == list(Role)
    for name in ("", "Admin", "admin ", "root", "0"):
        with pytest.raises(ValueError, match="is not a valid Role"):
            Role(name)


# What a cookie carries


def test_a_cookie_gives_back_its_user_and_generation(signer: SessionSigner, clock: Clock) -> None:
    session = found(signer, signer.new("ann", 3))
    assert (session.user, session.generation, session.began) == ("ann", 3, NOW)
    assert session.expires == NOW + MAX_AGE_SECONDS == NOW + 12 * 3600


@pytest.mark.parametrize("user", ["a", "x" * 64, "Ann.B_c@d-9", "ünï", "a; b=c", 'a"b'])
def test_a_cookie_of_any_user_has_only_characters_that_need_no_quotes(signer: SessionSigner, user: str) -> None:
    cookie = signer.new(user, 10**9)
    assert set(cookie) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    assert len(cookie) < MAX_COOKIE_CHARACTERS
    assert found(signer, cookie).user == user


def test_ids_of_sessions_differ_and_have_128_random_bits(signer: SessionSigner, clock: Clock) -> None:
    ids = {found(signer, signer.new("ann", 0)).id for _ in range(200)}
    assert len(ids) == 200
    assert all(len(base64.urlsafe_b64decode(each + "==")) == 16 for each in ids)


def test_a_cookie_of_another_generation_says_so(signer: SessionSigner) -> None:
    """The signer does not know the users: that the generation was raised is seen by comparison."""
    before, after = (found(signer, signer.new("ann", generation)) for generation in (4, 5))
    assert (before.generation, after.generation) == (4, 5)


def test_signers_of_one_secret_agree_as_router_and_control_plane_do(signer: SessionSigner) -> None:
    cookie = signer.new("ann", 0)
    other = SessionSigner(SECRET)
    assert other.session(cookie) == found(signer, cookie)
    assert other.is_token_of(found(other, cookie), signer.csrf_token(found(signer, cookie)))


# Signatures


def test_no_character_of_a_cookie_can_be_changed_left_out_or_added(signer: SessionSigner) -> None:
    cookie = signer.new("ann", 1)
    assert found(signer, cookie)
    original = decoded(cookie.split(".")[0])
    for place, character in enumerate(cookie):
        for other in {"A", "B", "-", "."} - {character}:
            changed = cookie[:place] + other + cookie[place + 1 :]
            if _is_spelling_of(changed, cookie):
                continue
            assert signer.session(changed) is None, (place, other)
        assert signer.session(cookie[:place] + cookie[place + 1 :]) is None, place
    for place in range(len(cookie)):
        assert signer.session(cookie[:place]) is None, place
    assert decoded(cookie.split(".")[0]) == original


def _is_spelling_of(changed: str, cookie: str) -> bool:
    """Whether only bits that base64 ignores differ, in the last character of the signature."""
    return changed.rpartition(".")[0] == cookie.rpartition(".")[0] and _bytes_of(changed) == _bytes_of(cookie)


def _bytes_of(cookie: str) -> bytes:
    signature = cookie.rpartition(".")[2]
    return base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))


@pytest.mark.parametrize("change", [{"user": "root"}, {"generation": 9}, {"id": "other"}])
def test_content_under_the_signature_of_other_content_is_refused(signer: SessionSigner, change: dict[str, Any]) -> None:
    content, began, signature = signer.new("ann", 1).split(".")
    forged = encoded(json.dumps(decoded(content) | change).encode())
    assert signer.session(f"{forged}.{began}.{signature}") is None


def test_parts_of_two_valid_cookies_make_no_third_one(signer: SessionSigner, clock: Clock) -> None:
    first = signer.new("ann", 1).split(".")
    clock.now += 5
    second = signer.new("bea", 2).split(".")
    for mask in range(1, 7):
        mixed = ".".join((second if mask >> place & 1 else first)[place] for place in range(3))
        assert signer.session(mixed) is None, mask


@pytest.mark.parametrize("secret", ["", "a secret", SECRET + " ", SECRET.upper(), "x" * 4096])
def test_a_cookie_of_another_secret_is_refused(signer: SessionSigner, secret: str) -> None:
    other = SessionSigner(secret)
    assert signer.session(other.new("ann", 1)) is None
    assert other.session(signer.new("ann", 1)) is None


def test_what_is_signed_with_the_secret_for_another_purpose_is_no_session(signer: SessionSigner) -> None:
    content = {"id": "i", "user": "root", "generation": 0}
    keyed = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
    purposes: list[tuple[str, dict[str, Any]]] = [
        ("funitel oidc login", keyed),
        ("itsdangerous", keyed),
        ("", keyed),
        ("funitel session", {}),
        ("funitel session", keyed | {"digest_method": hashlib.sha1}),
        ("funitel session", keyed | {"key_derivation": "none"}),
    ]
    for salt, arguments in purposes:
        serializer = URLSafeTimedSerializer(SECRET, salt=salt, signer_kwargs=arguments)
        assert signer.session(str(serializer.dumps(content))) is None, (salt, arguments)


# Expiry


@pytest.mark.parametrize(
    ("age", "is_valid"),
    [
        (0, True),
        (1, True),
        (MAX_AGE_SECONDS - 1, True),
        (MAX_AGE_SECONDS, True),
        (MAX_AGE_SECONDS + 1, False),
        (10 * MAX_AGE_SECONDS, False),
    ],
)
def test_a_session_ends_after_twelve_hours(signer: SessionSigner, clock: Clock, age: int, *, is_valid: bool) -> None:
    cookie = signer.new("ann", 1)
    clock.now += age
    assert (signer.session(cookie) is not None) == is_valid


def test_a_session_of_the_future_is_refused(signer: SessionSigner, clock: Clock) -> None:
    cookie = signer.new("ann", 1)
    clock.now -= 2
    assert signer.session(cookie) is None


def test_a_look_at_a_session_does_not_prolong_it(signer: SessionSigner, clock: Clock) -> None:
    cookie = signer.new("ann", 1)
    for _ in range(4):
        assert found(signer, cookie).expires == NOW + MAX_AGE_SECONDS
        clock.now += MAX_AGE_SECONDS / 3.9
    assert signer.session(cookie) is None


# CSRF tokens


def test_the_token_is_the_hmac_of_the_id_of_the_session(signer: SessionSigner) -> None:
    session = found(signer, signer.new("ann", 1))
    expected = hmac.new(SECRET.encode(), b"funitel csrf " + session.id.encode(), hashlib.sha256).hexdigest()
    assert signer.csrf_token(session) == expected
    assert signer.is_token_of(session, expected)


def test_the_token_of_a_session_is_that_of_no_other(signer: SessionSigner) -> None:
    mine, other = (found(signer, signer.new("ann", 1)) for _ in range(2))
    token = signer.csrf_token(mine)
    assert not signer.is_token_of(other, token)
    assert not SessionSigner(SECRET + "x").is_token_of(mine, token)
    for wrong in (
        "",
        token[:-1],
        token + "0",
        token.upper(),
        f" {token}",
        mine.id,
        "0" * 64,
        "é" * 64,
        "\0",
        token * 99,
    ):
        assert not signer.is_token_of(mine, wrong), wrong


def test_a_token_tells_nothing_that_the_cookie_has(signer: SessionSigner) -> None:
    cookie = signer.new("ann", 1)
    token = signer.csrf_token(found(signer, cookie))
    assert token not in cookie
    assert len(token) == 64
    assert signer.session(token) is None


# Names of cookies


def test_the_cookie_over_tls_has_the_prefix_that_browsers_bind_to_host_and_tls() -> None:
    assert SECURE_COOKIE == "__Host-" + COOKIE
    assert COOKIE == "funitel_session"


# Garbage


GARBAGE: list[str | Callable[[str], str]] = [
    "",
    " ",
    ".",
    "..",
    "...",
    ".." * 500,
    "\0",
    "a.b.c",
    "é.è.ê",
    "\ud7ff.\U0010ffff.x",
    "e30.AAAAAA.AAAA",
    ".e30.AAAAAA.AAAA",
    "null",
    '{"id": "i", "user": "root", "generation": 0}',
    "-" * MAX_COOKIE_CHARACTERS,
    lambda cookie: cookie + "\n",
    lambda cookie: " " + cookie,
    lambda cookie: cookie + ".",
    lambda cookie: "." + cookie,
    lambda cookie: f'"{cookie}"',
    lambda cookie: cookie.swapcase(),
    lambda cookie: cookie[::-1],
    lambda cookie: cookie + cookie,
    lambda cookie: cookie.replace(".", "%2E"),
    lambda cookie: ".".join(cookie.split(".")[:2]),
    lambda cookie: ".".join(reversed(cookie.split("."))),
    lambda cookie: f"{cookie.split('.')[0]}.{encoded(b'x' * 60)}.{cookie.split('.')[2]}",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_no_session(signer: SessionSigner, garbage: str | Callable[[str], str]) -> None:
    cookie = garbage if isinstance(garbage, str) else garbage(signer.new("ann", 1))
    assert signer.session(cookie) is None


@given(st.text(max_size=300))
def test_no_text_is_a_session_or_raises(cookie: str) -> None:
    assert SessionSigner(SECRET).session(cookie) is None


@given(st.text(alphabet="ABCDEFabcdef0123456789-_.", max_size=120), st.integers(0, 2))
def test_no_part_of_a_cookie_can_be_replaced_by_what_looks_like_one(part: str, place: int) -> None:
    signer = SessionSigner(SECRET)
    parts = signer.new("ann", 1).split(".")
    if parts[place] == part or (place == 2 and encoded(_bytes_of("." + parts[2])) == part):
        return
    parts[place] = part
    assert signer.session(".".join(parts)) is None


@given(st.text(max_size=200))
def test_no_text_is_a_token_or_raises(token: str) -> None:
    assert not SessionSigner(SECRET).is_token_of(Session("i", "ann", 0, float(NOW)), token)


def test_a_lone_surrogate_is_no_session(signer: SessionSigner) -> None:
    assert signer.session("\ud800") is None


def test_a_lone_surrogate_is_no_token(signer: SessionSigner) -> None:
    session = found(signer, signer.new("ann", 1))
    assert not signer.is_token_of(session, "\ud800")


def test_a_cookie_that_is_too_long_is_refused_before_it_is_checked(
    signer: SessionSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = signer.new("ann", 1)
    monkeypatch.setattr(sessions, "MAX_COOKIE_CHARACTERS", len(cookie))
    assert signer.session(cookie) is not None
    monkeypatch.setattr(sessions, "MAX_COOKIE_CHARACTERS", len(cookie) - 1)
    assert signer.session(cookie) is None


def test_megabytes_of_garbage_take_no_time(signer: SessionSigner) -> None:
    began = time.process_time()
    for _ in range(50):
        assert signer.session("." * (1 << 20)) is None
    assert time.process_time() - began < 0.5
