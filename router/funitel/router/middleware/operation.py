"""One row of the table of routes, `Operation`, and the row that a request takes."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from funitel.router.auth.access import Access

ROUTE = "funitel.route"  # in a request's scope: the Operation it takes, once one is found
UNKNOWN_ROUTE = "other"  # of paths that no route has: their number has no bound
PATH_PARAMETER = re.compile(r"{(\w+)(?::path)?}")  # one marked so may have slashes


class ModelUse(Enum):
    """What a route needs a model for; one that needs none is answered whatever models there are."""

    NONE = "none: it is about the server"
    ANY = "any: it works with a tokenizer, or does what the model is for"
    GENERATES = "a model that generates text"
    ENCODES = "an encoder"
    TRANSCRIBES = "a model that transcribes audio"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: its handler, and what goes in and out.

    Attributes:
        body: record of the request's JSON body, if it has one.
        query: record of the query's parameters, if it has any.
        form: record of the form of its body, as `multipart/form-data`, if it has one.
        answer: record of the JSON answer; None for text.
        event: record of each Server-Sent Event, when the route can stream.
        text: media type of an answer that is text; None for an empty one.
        error: record of a failure.
        failures: statuses a failure can have, besides `KEY_FAILURES` of a protected route.
        is_array: whether the answer is an array of `answer`.
        access: whether an API key is asked for.
        model: what it needs a model for; the body names which one, or the parameter `name` of the path.
        is_native: whether it is one of TGI's routes: a refused key is answered without a body, and an error has TGI's
            shape.
    """

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    _: KW_ONLY
    method: str
    error: type[BaseModel]
    failures: tuple[int, ...] = ()
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    text: str | None = None
    is_array: bool = False
    access: Access = Access.KEY
    model: ModelUse = ModelUse.NONE
    is_native: bool = False

    @property
    def is_protected(self) -> bool:
        """Whether an API key is asked for, when there is one."""
        return self.access not in (Access.FACT, Access.LOGIN, Access.PROBE)

    @property
    def documented_path(self) -> str:
        """The path without our marks of what a parameter may hold."""
        return PATH_PARAMETER.sub(r"{\1}", self.path)

    @property
    def answers(self) -> list[type[BaseModel]]:
        """Every record the route sends."""
        return [model for model in (self.answer, self.event, self.error) if model is not None]


def operation_of(scope: Scope) -> Operation | None:
    """Return the operation that a request takes; None for an unknown path."""
    return scope.get(ROUTE)


def route_of(scope: Scope) -> str:
    """Return the route that a request takes, as metrics and logs name it."""
    operation = operation_of(scope)
    return UNKNOWN_ROUTE if operation is None else operation.path


def is_native(scope: Scope) -> bool:
    """Whether a request takes one of TGI's routes: by the route found, for Vertex AI may choose a path under /v1."""
    operation = operation_of(scope)
    if operation is None:
        path: str = scope["path"]
        return not path.startswith("/v1/")
    return operation.is_native
