"""Handle KServe's open inference protocol, in the shape TGI gives it."""

from collections.abc import Sequence
from itertools import chain

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, LengthMismatch, ModelNotLoaded, NotUtf8
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, generation_route, models_of, service_of
from funitel.router.api.native.schema import NAMES, GenerateParameters
from funitel.router.api.platforms.schema import (
    KserveInput,
    KserveLive,
    KserveMetadata,
    KserveOutput,
    KserveRequest,
    KserveResponse,
    KserveWanted,
)
from funitel.router.fleet.models import ServedModel
from funitel.router.middleware.operation import ModelUse
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.inline_images import inline_prompt
from funitel.router.serving.prepare import prepare
from funitel.router.serving.run import Answer, check_count, collect_best, summed_headers
from funitel.router.serving.service import Service
from funitel.router.transport.sse import run_until_disconnect

SERVER_NAME = "text-generation-inference"  # what TGI calls itself here


async def server_metadata(http: HttpRequest) -> Response:
    """`/v2`: the server."""
    version = service_of(http).version
    return json_answer(KserveMetadata(name=SERVER_NAME, version=version, extensions=["health", "models", "metrics"]))


async def live(http: HttpRequest) -> Response:
    """`/v2/health/live`: that the router answers says all."""
    return json_answer(KserveLive(live=True))


async def ready(http: HttpRequest) -> Response:
    """`/v2/health/ready`: true, or 503 with the reason."""
    await models_of(http).check_ready()
    return json_answer(KserveLive(live=True))


async def model_ready(http: HttpRequest) -> Response:
    """The model's `ready`: true, or 503 with the reason; asking loads nothing."""
    model = _model(http)
    if model.service is None:
        raise ModelNotLoaded(f"the model {model.name!r} is {model.entry.state}")
    await model.service.check_ready()
    return json_answer(KserveLive(live=True))


def _model(http: HttpRequest) -> ServedModel:
    """The model that the path names; raises ModelNotFound."""
    return models_of(http).choose(http.path_params["name"], ModelUse.ANY)


async def model_metadata(http: HttpRequest) -> Response:
    """The model; its version is whatever the path says, and its name too where there is one model."""
    _model(http)
    name, version = http.path_params["name"], http.path_params["version"]
    return json_answer(KserveMetadata(name=name, version=version, extensions=["infer", "ready"]))


@generation_route
async def infer(incoming: IncomingRequest) -> Response:
    """Generate for every input, side by side."""
    body = await incoming.read(KserveRequest)
    answer, headers = await run_until_disconnect(
        incoming.http.receive, _answer(incoming.service, body, incoming.arrived)
    )
    return json_answer(answer, headers)


async def _answer(service: Service, body: KserveRequest, arrived: Arrival) -> tuple[KserveResponse, dict[str, str]]:
    if len(body.inputs) != len(body.outputs):
        raise LengthMismatch(
            f"`inputs` and `outputs` must have the same length. Given: {len(body.inputs)} and {len(body.outputs)}",
            "outputs",
        )
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    parameters = body.parameters or GenerateParameters()
    best_of = [parameters.best_of or 1] * len(body.inputs)
    check_count(service, "inputs", best_of)
    prompts = [_text(place, given) for place, given in enumerate(body.inputs)]
    jobs = []
    for text in prompts:
        prompt = await inline_prompt(service, text)
        jobs.append(await prepare(service, parameters.sampling, prompt, stream=False, arrived=arrived, names=NAMES))
    ranked = await collect_best(jobs, best_of)
    prefixes = [job.request.inputs if parameters.return_full_text else "" for job in jobs]
    outputs = _outputs(body.inputs, body.outputs, prefixes, [answers[0] for answers in ranked])
    return KserveResponse(id=body.id, outputs=outputs), summed_headers(jobs, list(chain.from_iterable(ranked)))


def _text(place: int, given: KserveInput) -> str:
    if given.is_text:
        return str(given.data[0])
    try:
        return bytes(item for item in given.data if isinstance(item, int)).decode()
    except UnicodeDecodeError as error:
        param = f"inputs.{place}.data"
        raise NotUtf8(f"{param} is not UTF-8: {error.reason} at byte {error.start}", param) from None


def _outputs(
    inputs: Sequence[KserveInput], wanted: Sequence[KserveWanted], prefixes: Sequence[str], answers: Sequence[Answer]
) -> list[KserveOutput]:
    outputs = []
    for given, output, prefix, answer in zip(inputs, wanted, prefixes, answers, strict=True):
        text = prefix + answer.finished.text
        data: list[int] | list[str] = [text] if given.is_text else list(text.encode())
        shape = [1] if given.is_text else [1, len(data)]
        outputs.append(KserveOutput(name=output.name, shape=shape, data=data))
    return outputs
