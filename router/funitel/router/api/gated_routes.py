"""Make the routes of an application of the table: each behind its gate and the choice of its model."""

from collections.abc import Callable, Iterable
from functools import partial

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.routing import Route

from funitel.router.api.common.handler import is_journalled
from funitel.router.api.common.model_choice import ModelChoice
from funitel.router.api.openapi import Pages
from funitel.router.api.routes import operations, pages
from funitel.router.auth.accounts import Accounts
from funitel.router.fleet.loading import Loads
from funitel.router.fleet.models import ServedModels
from funitel.router.middleware.operation import ModelUse, Operation
from funitel.router.middleware.route_gate import RouteGate
from funitel.router.settings import RouterSettings

NAME, NAME_WITH_SLASHES = "{name}", "{name:path}"  # of a model
OF_ANY_TEXT = ":path}", ":text}"  # of a parameter in the table, and in a route


class AnyText(PathConvertor):
    """As `path`, and takes line breaks too, which a path may have percent-encoded."""

    regex = "(?s:.*)"


register_url_convertor("text", AnyText())


def gated_routes(
    settings: RouterSettings, accounts: Accounts, models: ServedModels, loads: Loads | None
) -> tuple[list[Route], Callable[[], Pages]]:
    """Return the routes, and what writes their document; without `loads` there is one model, and none is chosen."""
    listed = operations(settings)
    return [_gated(operation, accounts, models, loads) for operation in listed], partial(pages, listed)


def journalled_paths(routes: Iterable[Route]) -> frozenset[str]:
    """The paths, without parameters, of POST requests that may be put into the journal before their handler begins."""
    posts = (route for route in routes if "POST" in (route.methods or ()) and not route.param_convertors)
    return frozenset(route.path for route in posts if is_journalled(route.endpoint))


def _gated(operation: Operation, accounts: Accounts, models: ServedModels, loads: Loads | None) -> Route:
    layers = [Middleware(RouteGate, operation=operation, accounts=accounts, drain=models.drain, models=models)]
    if loads is not None and operation.model is not ModelUse.NONE:
        layers.append(Middleware(ModelChoice, operation=operation, models=models, loads=loads))
    path = operation.path.replace(NAME, NAME_WITH_SLASHES).replace(*OF_ANY_TEXT)
    return Route(path, operation.handler, methods=[operation.method], middleware=layers)
