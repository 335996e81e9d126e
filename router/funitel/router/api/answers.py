"""Records as JSON answers."""

from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response


def json_answer(body: BaseModel, headers: Mapping[str, str] | None = None, *, status: int = 200) -> Response:
    """Answer with one record."""
    return Response(body.model_dump_json(), status, headers, "application/json")
