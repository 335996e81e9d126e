"""Handle `/vertex` of Vertex AI, which carries bodies of `/generate` and of chats."""

from itertools import chain

from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, NoInstances
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, generation_route
from funitel.router.api.native.schema import NAMES, GenerateParameters, GenerateRequest
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.api.platforms.schema import VertexRequest, VertexResponse
from funitel.router.chat.run import prepare_chat
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.inline_images import inline_prompt
from funitel.router.serving.prepare import GenerationJob, prepare
from funitel.router.serving.run import check_count, collect_best, summed_headers
from funitel.router.serving.service import Service
from funitel.router.transport.sse import run_until_disconnect


@generation_route
async def vertex(incoming: IncomingRequest) -> Response:
    """`/vertex`: the texts of all instances, generated side by side."""
    body = await incoming.read(VertexRequest)
    if not body.instances:
        raise NoInstances("`instances` cannot be empty", "instances")
    answer, headers = await run_until_disconnect(
        incoming.http.receive, _predict(incoming.service, body, incoming.arrived)
    )
    return json_answer(answer, headers)


async def _predict(service: Service, body: VertexRequest, arrived: Arrival) -> tuple[VertexResponse, dict[str, str]]:
    best_of = [_best_of(instance) for instance in body.instances]
    check_count(service, "instances", best_of)
    jobs = [await _job(service, instance, arrived) for instance in body.instances]
    ranked = await collect_best(jobs, best_of)
    prefixes = [_prefix(instance, job) for instance, job in zip(body.instances, jobs, strict=True)]
    texts = [prefix + answers[0].finished.text for prefix, answers in zip(prefixes, ranked, strict=True)]
    return VertexResponse(predictions=texts), summed_headers(jobs, list(chain.from_iterable(ranked)))


async def _job(service: Service, instance: GenerateRequest | ChatRequest, arrived: Arrival) -> GenerationJob:
    if isinstance(instance, ChatRequest):
        return await _chat_job(service, instance, arrived)
    parameters = _vertex_parameters(instance)
    prompt = await inline_prompt(service, instance.inputs)
    return await prepare(service, parameters.sampling, prompt, stream=False, arrived=arrived, names=NAMES)


async def _chat_job(service: Service, body: ChatRequest, arrived: Arrival) -> GenerationJob:
    body.check()
    chat = await prepare_chat(service, body.call, stream=False, arrived=arrived)
    if len(chat.jobs) != 1:
        raise InvalidRequest(f"`n` must be 1: an instance has one prediction. Given: {len(chat.jobs)}", "n")
    return chat.jobs[0]


def _vertex_parameters(instance: GenerateRequest) -> GenerateParameters:
    """The parameters given; TGI samples here unless, as only we let it, the request says otherwise."""
    parameters = instance.effective_parameters
    if "do_sample" in parameters.model_fields_set:
        return parameters
    return parameters.model_copy(update={"do_sample": True})


def _best_of(instance: GenerateRequest | ChatRequest) -> int:
    return 1 if isinstance(instance, ChatRequest) else instance.effective_parameters.best_of or 1


def _prefix(instance: GenerateRequest | ChatRequest, job: GenerationJob) -> str:
    if isinstance(instance, ChatRequest) or not instance.effective_parameters.return_full_text:
        return ""
    return job.request.inputs
