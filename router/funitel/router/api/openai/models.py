"""Handle OpenAI's `/v1/models`: the one model that is served."""

from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import ModelNotFound
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import service_of
from funitel.router.api.common.schema_base import is_none
from funitel.router.serving.service import Service


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    max_model_len: int | None = Field(
        default=None,
        exclude_if=is_none,
        description="Tokens of a prompt and its completion; absent until the shards answer.",
    )

    @classmethod
    def of(cls, service: Service) -> "Model":
        """The model that is served."""
        name = service.model_id
        return cls(id=name, owned_by=name, max_model_len=service.max_model_len if service.is_started else None)


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


async def models(http: HttpRequest) -> Response:
    """`/v1/models`: the one model that is served."""
    return json_answer(ModelList(data=[Model.of(service_of(http))]))


async def model(http: HttpRequest) -> Response:
    """`/v1/models/{model}`: the one model that is served, by its name."""
    found, asked = Model.of(service_of(http)), http.path_params["model"]
    if asked != found.id:
        raise ModelNotFound(f"no model is named {asked!r}; the one here is {found.id!r}")
    return json_answer(found)
