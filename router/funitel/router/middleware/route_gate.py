"""The gate of one route: it notes the route, checks the API key, and refuses requests while the router drains."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.router.auth.access import Access
from funitel.router.auth.accounts import Account, Accounts
from funitel.router.core import request_context
from funitel.router.core.drain import Drain
from funitel.router.core.journal import is_replayed
from funitel.router.middleware.auth import check_key, is_background_request
from funitel.router.middleware.operation import ROUTE, Operation


class ModelNames(Protocol):
    """The names of the models that are served."""

    only_name: str | None  # of the only model


class RouteGate:
    """Around one route, so that it checks the route that was found, however the path was written.

    Args:
        app: the route.
        operation: its row of the table.
        accounts: those of all keys.
        drain: counts the requests of routes that work, and refuses them once it has begun.
        models: for the only one a key must be, whatever name a request gives it.
    """

    def __init__(
        self, app: ASGIApp, operation: Operation, accounts: Accounts, drain: Drain, models: ModelNames
    ) -> None:
        self._app = app
        self._operation = operation
        self._accounts = accounts
        self._checks_key = accounts.is_asked_for and operation.is_protected
        is_counted = operation.is_protected and operation.access not in (Access.CLOSED_FACT, Access.CONTINUED)
        self._drain = drain if is_counted else None
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._operation
        was_admitted = is_replayed(scope)
        if was_admitted and self._checks_key:
            await self._accounts.known()
        drain = nullcontext() if self._drain is None else self._drain.admitted(was_admitted=was_admitted)
        with self._entered(scope, was_admitted=was_admitted), drain:
            await self._app(scope, receive, send)

    def _entered(self, scope: Scope, *, was_admitted: bool) -> AbstractContextManager[None]:
        """Check the key; the request counts as one of its account while the block runs."""
        if not self._checks_key:
            return nullcontext()
        account = check_key(scope, self._accounts, self._operation, self._models.only_name)
        if self._operation.access is Access.CONTINUED:
            return nullcontext()
        return self._charged(account, is_background=is_background_request(scope), was_admitted=was_admitted)

    @contextmanager
    def _charged(self, account: Account, *, is_background: bool, was_admitted: bool) -> Iterator[None]:
        """Charge the long texts that were encoded for a request which did not get as far as the model."""
        with account.entered(time.monotonic(), is_background=is_background, was_admitted=was_admitted):
            try:
                yield
            finally:
                context = request_context.current()
                if context.encoded_tokens and context.prompt_tokens is None:
                    account.settle(0, context.encoded_tokens, 0, time.monotonic())
