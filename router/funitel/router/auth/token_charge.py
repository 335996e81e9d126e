"""Charge the tokens of a request to the account of its API key: the most before it runs, what it took afterwards."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from funitel.router.auth.accounts import Account


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request: a prompt that several sequences share counts once."""

    prompt: int = 0
    completion: int = 0


@contextmanager
def charged(account: Account | None, most: Callable[[], int], used: Callable[[], TokenCounts]) -> Iterator[None]:
    """Let the block run if the account has `most` tokens left, and charge what was `used` by its end.

    However it ends: a client that leaves pays for what was computed.

    Raises:
        RateLimited: the tokens are not left.
    """
    if account is None:
        yield
        return
    num_reserved = most()
    account.reserve(num_reserved, time.monotonic())
    try:
        yield
    finally:
        tokens = used()
        account.settle(num_reserved, tokens.prompt, tokens.completion, time.monotonic())
