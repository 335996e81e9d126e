"""Handle vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which are for operators."""

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from funitel.router.api.common.asker import audited
from funitel.router.api.common.body import forget_body, read_body
from funitel.router.api.common.handler import models_of, service_of
from funitel.router.api.vllm.schema import LoadAdapter, UnloadAdapter
from funitel.router.middleware.operation import ModelUse
from funitel.router.serving.service import Service


async def load(http: HttpRequest) -> Response:
    """`/v1/load_lora_adapter`: load an adapter on every replica, and let requests name it."""
    service = service_of(http)
    engine = service.engine
    try:
        body = await read_body(http, LoadAdapter, service)
    finally:
        forget_body(http.scope)
    after = {"name": body.lora_name, "path": body.lora_path, "pinned": bool(body.pinned)}
    async with audited(http, f"adapter {body.lora_name}", before=_shown(service, body.lora_name), after=after):
        await service.adapters.load(
            engine, body.lora_name, body.lora_path, is_pinned=bool(body.pinned), in_place=bool(body.load_inplace)
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


def _shown(service: Service, name: str) -> dict[str, object] | None:
    """An adapter as the audit has it."""
    known = service.adapters.get(name)
    return None if known is None else {"name": name, "path": known.adapter.path}


def _service_with(http: HttpRequest, adapter: str) -> Service:
    """The service that has an adapter; the router's own or that of the default model where none has it."""
    models = models_of(http)
    found = next((service for service in models.services if service.adapters.get(adapter) is not None), None)
    return found or models.default(ModelUse.GENERATES).service or models.own


async def unload(http: HttpRequest) -> Response:
    """`/v1/unload_lora_adapter`: let no further request name an adapter; it is unloaded once none uses it."""
    own = service_of(http)
    try:
        body = await read_body(http, UnloadAdapter, own)
    finally:
        forget_body(http.scope)
    service = _service_with(http, body.lora_name)
    engine = service.engine
    async with audited(http, f"adapter {body.lora_name}", before=_shown(service, body.lora_name), after=None):
        service.adapters.unload(engine, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
