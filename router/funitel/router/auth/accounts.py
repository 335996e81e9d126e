"""Accounts of API keys: check their routes, models and rate limits, and charge the tokens of requests. Knows no HTTP.

A key is looked up by its SHA-256. The time of a look-up depends on that hash only, and a client cannot choose a hash
near that of an unknown key, so it leaks nothing; a key itself is never compared or stored.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from funitel.proto.errors import Forbidden, FunitelError, RateLimited, SettingsError
from funitel.proto.security.keys import SETTING_NAME, Key, covers, digest_of, keys_of
from funitel.router.auth.rate_limit import MinuteWindow
from funitel.router.auth.wrong_keys import WrongKeys
from funitel.router.core.file_watch import FileWatch
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_SALT = secrets.token_bytes(16)


def owner_of(token: bytes) -> bytes:
    """The owner of a request, for the scheduler and the store of responses: a hash salted anew at every start."""
    return hashlib.blake2b(token, key=_SALT, digest_size=16).digest()


class Account:
    """What requests with one key have used. Event loop only; instants are of the monotonic clock.

    A key of the same digest that is read again takes its place in `key`: its limits change, what was used stays.
    """

    def __init__(self, key: Key, metrics: Metrics) -> None:
        self.key = key
        self._metrics = metrics
        self.owner = owner_of(key.digest)
        self._num_running = 0
        self._requests = MinuteWindow()
        self._tokens = MinuteWindow()
        self._num_reserved = 0  # tokens of requests that have not ended

    def is_valid(self, wall_clock: float) -> bool:
        """Whether the key is neither revoked nor expired."""
        key = self.key
        return key.revoked is None and (key.expires is None or wall_clock < key.expires.timestamp())

    @property
    def _is_setting(self) -> bool:
        """Whether the key is a setting, not of a file."""
        return self.key.is_bare and self.key.name == SETTING_NAME

    def check_route(self, path: str, *, is_for_operators: bool = False) -> None:
        """Raise Forbidden unless the key is for a route, by the path in the table of routes.

        One for operators must be among the key's routes by its very path, save for the key that is a setting.
        """
        routes = self.key.routes
        if is_for_operators and not self._is_setting and path not in routes:
            words = f"this API key is for no operator's route: its `routes` must list {path}, without a pattern"
            raise self._refusal("route", Forbidden(words))
        if not covers(routes, path):
            words = f"this API key is for the routes {', '.join(routes)}. Given: {path}"
            raise self._refusal("route", Forbidden(words))

    def check_model(self, name: str) -> None:
        """Raise Forbidden unless the key is for a model."""
        models = self.key.models
        if not covers(models, name):
            words = f"this API key is for the models {', '.join(models)}. Given: {name!r}"
            raise self._refusal("model", Forbidden(words))

    @contextmanager
    def entered(self, now: float, *, is_background: bool = False) -> Iterator[None]:
        """Count a request, which lasts as long as the block; one of a batch is not counted as one that runs.

        Raises:
            RateLimited: the key has too many requests at once, or had too many, or too many tokens, within a minute.
        """
        if not is_background:
            self._check_concurrency()
        self._check_limits(now)
        self._metrics.count_key_request(self.key.name)
        self._requests.add(1, now)
        with nullcontext() if is_background else self.prolonged():
            yield

    @contextmanager
    def prolonged(self) -> Iterator[None]:
        """Count a request that goes on after it was answered, as long as the block lasts."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _check_concurrency(self) -> None:
        limit = self.key.max_concurrent_requests
        if limit is not None and self._num_running >= limit:
            raise self._refusal("concurrency", RateLimited(f"at most {limit} requests of this API key run at once"))

    def _check_limits(self, now: float) -> None:
        limit = self.key.requests_per_minute
        if limit is not None and self._requests.used(now) >= limit:
            wait = self._requests.seconds_until(limit - 1, now)
            raise self._refusal("requests", RateLimited(f"at most {limit} requests a minute with this API key", wait))
        self._check_tokens(1, now)

    def _check_tokens(self, num_tokens: int, now: float) -> None:
        limit = self.key.tokens_per_minute
        if limit is None:
            return
        wanted = min(num_tokens, limit)  # what is more than a whole minute's is let in when nothing else was used
        used, reserved = self._tokens.used(now), self._num_reserved
        if used + reserved + wanted > limit:
            wait = self._tokens.seconds_until(limit - wanted, now)  # those that run may give back what they reserve
            words = f"at most {limit} tokens a minute with this API key: {used} are used, requests that run may take "
            raise self._refusal("tokens", RateLimited(f"{words}{reserved}, this one {num_tokens}", wait))

    def reserve(self, num_tokens: int, now: float) -> None:
        """Reserve the maximum of tokens that a request may take, until it is settled.

        Raises:
            RateLimited: so many are not left of the minute.
        """
        self._check_tokens(num_tokens, now)
        self._num_reserved += num_tokens

    def settle(self, num_reserved: int, num_prompt: int, num_completion: int, now: float) -> None:
        """End a reservation: what the request has taken is used."""
        self._num_reserved -= num_reserved
        self._tokens.add(num_prompt + num_completion, now)
        self._metrics.count_key_tokens(self.key.name, num_prompt, num_completion)

    def _refusal(self, reason: str, error: FunitelError) -> FunitelError:
        """Count a refusal."""
        self._metrics.count_key_refused(self.key.name, reason)
        return error


class Accounts:
    """The accounts of all keys; where none was given, none is asked for.

    Raises SettingsError when the file of keys cannot be read, or is none.
    """

    def __init__(
        self, key: str | None, path: str | None, metrics: Metrics, max_wrong_keys: int = 0, ban_seconds: float = 300.0
    ) -> None:
        self.wrong_keys = WrongKeys(max_wrong_keys, ban_seconds)
        self.is_asked_for = key is not None or path is not None
        self._key = key
        self._path = path
        self._metrics = metrics
        self._watch = FileWatch(*([] if path is None else [path]))
        self._by_digest: dict[bytes, Account] = {}
        self._by_owner: dict[str, list[Account]] = {}  # a revoked key may have the name of its successor
        self._read()

    def __len__(self) -> int:
        return len(self._by_digest)

    def _read(self) -> None:
        accounts = {}
        for key in keys_of(self._key, self._path):  # of one digest that is there twice the last line counts
            account = accounts[key.digest] = self._by_digest.get(key.digest) or Account(key, self._metrics)
            account.key = key
        by_owner: dict[str, list[Account]] = {}
        for account in accounts.values():
            by_owner.setdefault(account.key.owner, []).append(account)
        self._by_digest, self._by_owner = accounts, by_owner

    def refresh(self) -> None:
        """Read the file again if it has changed; one that is wrong changes nothing but the log. Any thread."""
        if not self._watch.has_changed():
            return
        try:
            self._read()
        except SettingsError as error:
            logger.error("the API keys stay as they were: %s", error.message)
        else:
            logger.info("API keys read again: %d", len(self))

    def find(self, tokens: tuple[bytes, ...]) -> Account | None:
        """The account of the first of `tokens` that is a valid key."""
        now = time.time()
        for token in tokens:
            account = self._by_digest.get(digest_of(token)) if token else None
            if account is not None and account.is_valid(now):
                return account
        return None

    def find_owner(self, owner: str) -> Account | None:
        """The account of the valid key that things of an owner belong to (`Key.owner`)."""
        now = time.time()
        return next((account for account in self._by_owner.get(owner, ()) if account.is_valid(now)), None)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: a prompt that several sequences share counts once."""

    prompt: int = 0
    completion: int = 0


@contextmanager
def charged(account: Account | None, max_tokens: Callable[[], int], used: Callable[[], TokenCounts]) -> Iterator[None]:
    """Let the block run if the account has `max_tokens` left, and charge what was `used` by its end.

    However it ends: a client that leaves pays for what was computed.

    Raises:
        RateLimited: the tokens are not left.
    """
    if account is None:
        yield
        return
    num_reserved = max_tokens()
    account.reserve(num_reserved, time.monotonic())
    try:
        yield
    finally:
        tokens = used()
        account.settle(num_reserved, tokens.prompt, tokens.completion, time.monotonic())
