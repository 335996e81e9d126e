"""What the handlers of files and of batches share: the batches of the application, the owner, queries and pages."""

from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from funitel.router.api.common.body import shape_error
from funitel.router.batch.records import Page
from funitel.router.batch.service import Batches
from funitel.router.middleware.auth import account_of

Q = TypeVar("Q", bound=BaseModel)


def batches_of(http: HttpRequest) -> Batches:
    """The batches of the application that got the request."""
    return cast(Batches, http.app.state.batches)


def owner_of(http: HttpRequest) -> str:
    """The owner of files and batches: that of the API key, which a restart does not change; empty without one."""
    account = account_of(http.scope)
    return "" if account is None else account.key.owner


def query_of(http: HttpRequest, model: type[Q]) -> Q:
    """Read the parameters of a query; raises InvalidRequest."""
    given = dict(http.query_params)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise shape_error(error, given) from None


def page_of(limit: int, after: str | None, *, is_newest_first: bool = True) -> Page:
    """The page that a query asks for."""
    return Page(limit, after, is_newest_first)
