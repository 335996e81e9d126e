"""Handle OpenAI's `/v1/models`: the model that is served, and its adapters."""

from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import ModelNotFound
from funitel.router.adapters.registry import KnownAdapter
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import service_of
from funitel.router.api.common.schema_base import is_none
from funitel.router.serving.service import Service


class Model(BaseModel):
    """The model that is served, or one of its adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    max_model_len: int | None = Field(
        default=None,
        exclude_if=is_none,
        description="Tokens of a prompt and its completion; absent until the shards answer.",
    )
    root: str | None = Field(
        default=None, exclude_if=is_none, description="The model's own name, or the folder of an adapter."
    )
    parent: str | None = Field(default=None, exclude_if=is_none, description="The model that an adapter is for.")

    @classmethod
    def of(cls, service: Service) -> "Model":
        """The model that is served."""
        name = service.model_id
        max_len = service.max_model_len if service.is_started else None
        root = name if service.adapters.known else None
        return cls(id=name, owned_by=name, max_model_len=max_len, root=root)

    @classmethod
    def of_adapter(cls, service: Service, known: KnownAdapter) -> "Model":
        """An adapter of the model that is served."""
        base = cls.of(service)
        name, path = known.adapter.name, known.adapter.path
        return cls(id=name, owned_by=base.owned_by, max_model_len=base.max_model_len, root=path, parent=base.id)


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


async def models(http: HttpRequest) -> Response:
    """`/v1/models`: the model that is served, then its adapters."""
    service = service_of(http)
    adapters = [Model.of_adapter(service, known) for known in service.adapters.known]
    return json_answer(ModelList(data=[Model.of(service), *adapters]))


async def model(http: HttpRequest) -> Response:
    """`/v1/models/{model}`: the model that is served or one of its adapters, by its name."""
    service = service_of(http)
    base, asked = Model.of(service), http.path_params["model"]
    known = service.adapters.get(asked)
    if known is not None:
        return json_answer(Model.of_adapter(service, known))
    if asked != base.id:
        raise ModelNotFound(f"no model is named {asked!r}; the one here is {base.id!r}")
    return json_answer(base)
