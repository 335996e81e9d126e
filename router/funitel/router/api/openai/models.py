"""Handle OpenAI's `/v1/models`: the one model that is served."""

from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import ModelNotFound
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import service_of


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


async def models(http: HttpRequest) -> Response:
    """`/v1/models`: the one model that is served."""
    name = service_of(http).model_id
    body = ModelList(data=[Model(id=name, owned_by=name)])
    return json_answer(body)


async def model(http: HttpRequest) -> Response:
    """`/v1/models/{model}`: the one model that is served, by its name."""
    name, asked = service_of(http).model_id, http.path_params["model"]
    if asked != name:
        raise ModelNotFound(f"no model is named {asked!r}; the one here is {name!r}")
    return json_answer(Model(id=name, owned_by=name))
