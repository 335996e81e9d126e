"""What the handlers of files and of batches share: the batches of the application, the owner, pages."""

from typing import cast

from starlette.requests import Request as HttpRequest

from funitel.router.batch.records import Page
from funitel.router.batch.service import Batches
from funitel.router.middleware.auth import account_of


def batches_of(http: HttpRequest) -> Batches:
    """The batches of the application that got the request."""
    return cast(Batches, http.app.state.batches)


def owner_of(http: HttpRequest) -> str:
    """The owner of files and batches: that of the API key, which a restart does not change; empty without one."""
    account = account_of(http.scope)
    return "" if account is None else account.key.owner


def page_of(limit: int, after: str | None, *, is_newest_first: bool = True) -> Page:
    """The page that a query asks for."""
    return Page(limit, after, is_newest_first)
