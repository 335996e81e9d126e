"""Handle OpenAI's `/v1/models`: the models, with their state where a control plane knows it, and their adapters."""

from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.router.adapters.registry import KnownAdapter
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import models_of
from funitel.router.api.common.schema_base import ApiModel, is_none
from funitel.router.api.common.schema_models import ModelRecord
from funitel.router.fleet.models import ServedModel, ServedModels
from funitel.router.serving.service import Service


class Model(ApiModel):
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
    modalities: list[str] | None = Field(
        default=None,
        exclude_if=is_none,
        description="What a prompt may have, such as `text` and `image`; absent where it is text alone.",
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
        return cls(id=name, owned_by=name, max_model_len=max_len, modalities=service.modalities, root=root)

    @classmethod
    def of_adapter(cls, service: Service, known: KnownAdapter) -> "Model":
        """An adapter of the model that is served."""
        base = cls.of(service)
        name, path = known.adapter.name, known.adapter.path
        return base.model_copy(update={"id": name, "root": path, "parent": base.id})


class LaunchedModelInfo(ModelRecord, Model):
    """A model that the control plane knows: OpenAI's record, with its state beside."""

    @classmethod
    def of_entry(cls, model: ServedModel) -> "LaunchedModelInfo":
        """One of the table, loaded or not."""
        entry, service = model.entry, model.service
        openai: dict[str, Any] = {} if service is None else Model.of(service).model_dump()
        known = {"id": entry.name, "owned_by": entry.name, "created": int(entry.created)}
        return cls.model_validate(openai | known | ModelRecord.fields_of(entry))


class ModelList(ApiModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[LaunchedModelInfo | Model]


async def models(http: HttpRequest) -> Response:
    """`/v1/models`: the models, loaded or not, each before its adapters."""
    table = models_of(http)
    listed = [record for model in table for record in (_record(table, model), *_adapters(model))]
    return json_answer(ModelList(data=listed))


async def model(http: HttpRequest) -> Response:
    """`/v1/models/{model}`: a model or an adapter, by its name."""
    table, asked = models_of(http), http.path_params["model"]
    found = table.named(asked)
    adapter = None if found.service is None or asked == found.name else found.service.adapters.get(asked)
    if found.service is not None and adapter is not None:
        return json_answer(Model.of_adapter(found.service, adapter))
    return json_answer(_record(table, found))


def _record(table: ServedModels, model: ServedModel) -> Model:
    """The record of a model; without a control plane OpenAI's alone."""
    if table.snapshot is None and model.service is not None:
        return Model.of(model.service)
    return LaunchedModelInfo.of_entry(model)


def _adapters(model: ServedModel) -> list[Model]:
    service = model.service
    return [] if service is None else [Model.of_adapter(service, known) for known in service.adapters.known]
