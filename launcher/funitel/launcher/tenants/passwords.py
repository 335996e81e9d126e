"""Passwords: their rules, and their hashes by argon2id (RFC 9106); a check takes tens of milliseconds on purpose."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from funitel.proto.errors import InvalidRequest

T = TypeVar("T")

MIN_CHARACTERS, MAX_BYTES = 10, 1024
NUM_THREADS = 2  # each check takes 64 MiB; more logins wait


class Passwords:
    """Hashes and checks passwords off the event loop."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="passwords")
        self._decoy: str | None = None

    async def hash(self, password: str) -> str:
        """The hash of a password, with a salt of its own."""
        return await self._in_thread(self._hasher.hash, password)

    async def is_right(self, hashed: str | None, password: str) -> bool:
        """Whether a password is that of a hash; without one it is wrong, after the same time."""
        if self._decoy is None:
            self._decoy = await self.hash("no user has this password")
        found = await self._in_thread(self._check, self._decoy if hashed is None else hashed, password)
        return found and hashed is not None

    def _check(self, hashed: str, password: str) -> bool:
        try:
            return self._hasher.verify(hashed, password)
        except (Argon2Error, InvalidHashError):
            return False

    async def _in_thread(self, function: Callable[..., T], *args: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)


def check_password(password: str, name: str) -> str:
    """Return a password that may be set; raises InvalidRequest for one that may not."""
    if len(password) < MIN_CHARACTERS or len(password.encode()) > MAX_BYTES:
        rule = f"must have {MIN_CHARACTERS} characters or more, and at most {MAX_BYTES} bytes"
        raise InvalidRequest(f"`password` {rule}. It has {len(password)} characters", "password")
    if name.casefold() in password.casefold():
        raise InvalidRequest("`password` must not contain the name of the user", "password")
    return password
