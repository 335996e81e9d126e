"""Join the routes of all protocols in one table, of which the application, the document and the key check are made."""

from dataclasses import replace
from functools import cache
from typing import Any

from funitel.router.api import (
    anthropic,
    audio,
    batches,
    embeddings,
    fleet,
    inferflow,
    native,
    openai,
    openapi,
    operators,
    platforms,
    requests,
    responses,
    steps,
    vllm,
)
from funitel.router.api.common.route_kinds import closed, with_openai_errors
from funitel.router.api.operators import CONSOLE_ROUTES, DEBUG_ROUTES, HEALTH, USER_ROUTES
from funitel.router.api.platforms import VERTEX
from funitel.router.middleware.operation import Operation
from funitel.router.settings import RouterSettings

TITLE = "funitel"

OPERATIONS: tuple[Operation, ...] = (
    *native.ROUTES,
    *vllm.ROUTES,
    *fleet.ROUTES,
    *openai.ROUTES,
    *embeddings.ROUTES,
    *audio.ROUTES,
    *responses.ROUTES,
    *requests.ROUTES,
    *steps.ROUTES,
    *inferflow.ROUTES,
    *batches.ROUTES,
    *anthropic.ROUTES,
    *platforms.ROUTES,
    *operators.ROUTES,
    *USER_ROUTES,
    *CONSOLE_ROUTES,
)


def operations(settings: RouterSettings) -> tuple[Operation, ...]:
    """All routes, after those with a path that the platform chose."""
    chosen = []
    if settings.aip_predict_route is not None:
        chosen.append(replace(VERTEX, path=settings.aip_predict_route))
    if settings.aip_health_route is not None:
        chosen.append(replace(HEALTH, path=settings.aip_health_route))
    taken = {(operation.method, operation.path) for operation in chosen}
    usual = OPERATIONS if settings.console else tuple(each for each in OPERATIONS if each not in CONSOLE_ROUTES)
    usual += DEBUG_ROUTES if settings.debug_routes else ()
    listed: tuple[Operation, ...] = (
        *chosen,
        *(operation for operation in usual if (operation.method, operation.path) not in taken),
    )
    if settings.openai_errors:
        listed = tuple(map(with_openai_errors, listed))
    return tuple(map(closed, listed)) if settings.protect_all_routes else listed


@cache
def document(listed: tuple[Operation, ...] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI document of routes; made once, when first asked for."""
    return openapi.document(listed, TITLE)


@cache
def pages(listed: tuple[Operation, ...] = OPERATIONS) -> openapi.Pages:
    """The same as it is sent, for programs and for people; written once."""
    has_console = any(each in CONSOLE_ROUTES and not each.is_protected for each in listed)  # its files need no key
    return openapi.pages(document(listed), has_console=has_console)
