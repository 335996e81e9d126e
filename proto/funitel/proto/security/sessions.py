"""Sessions of the console as signed cookies: the control plane signs them, the router checks them.

A cookie has the id of the session, the user and the generation of the user's sessions; it is signed, not encrypted.
A page sends the token of its session as a header with each request that changes something, which a page of another
site cannot read.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from itsdangerous import BadSignature, SignatureExpired, URLSafeTimedSerializer

COOKIE = "funitel_session"
SECURE_COOKIE = "__Host-funitel_session"  # over TLS: browsers take it from no other host, and from no page without TLS
CSRF_HEADER = "x-funitel-csrf"
MAX_AGE_SECONDS = 12 * 3600
MAX_COOKIE_CHARACTERS = 2048
_SALT, _CSRF_SALT = "funitel session", b"funitel csrf "
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Session:
    """A session.

    Attributes:
        id: unique for ever.
        user: name of the user.
        generation: of the user's sessions.
        began: in Unix seconds.
    """

    id: str
    user: str
    generation: int
    began: float

    @property
    def expires(self) -> float:
        """When it ends by itself, in Unix seconds."""
        return self.began + MAX_AGE_SECONDS


class SessionSigner:
    """Signs and checks sessions with one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._serializer = URLSafeTimedSerializer(
            secret, salt=_SALT, signer_kwargs={"digest_method": hashlib.sha256, "key_derivation": "hmac"}
        )

    def new(self, user: str, generation: int) -> str:
        """The cookie of a new session."""
        content = {"id": secrets.token_urlsafe(_ID_BYTES), "user": user, "generation": generation}
        cookie = self._serializer.dumps(content)
        return cookie.decode() if isinstance(cookie, bytes) else cookie

    def session(self, cookie: str) -> Session | None:
        """The session of a cookie; None for one that is not signed so, or has expired."""
        if len(cookie) > MAX_COOKIE_CHARACTERS:
            return None
        try:
            content, began = self._serializer.loads(cookie, max_age=MAX_AGE_SECONDS, return_timestamp=True)
        except (SignatureExpired, BadSignature, UnicodeError):
            return None
        return Session(content["id"], content["user"], content["generation"], began.timestamp())

    def csrf_token(self, session: Session) -> str:
        """The token that pages of a session send with each change."""
        return hmac.new(self._secret, _CSRF_SALT + session.id.encode(), hashlib.sha256).hexdigest()

    def is_token_of(self, session: Session, token: str) -> bool:
        """Whether a token is that of a session."""
        return hmac.compare_digest(self.csrf_token(session).encode(), token.encode(errors="replace"))
