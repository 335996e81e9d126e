"""Handle `POST /`, the route of clients that know no more than a server's address: what the served model is for."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.step import EncoderTask
from funitel.router.api.audio.handlers import serve_recognition
from funitel.router.api.common.body import read_json
from funitel.router.api.common.handler import IncomingRequest, encoder_route, service_of
from funitel.router.api.embeddings import handlers, similarity
from funitel.router.api.native import generate


async def serve_task(http: HttpRequest) -> Response:
    """`POST /`: `/generate` in TGI's old form, `/embed` or `/similarity`, `/rerank`, `/predict`, or speech as text."""
    service = service_of(http)
    if service.is_transcriber:
        return await serve_recognition(http)
    if not service.is_encoder:
        return await generate.compat_generate(http)
    if service.encoder.is_ranker:
        return await similarity.rerank(http)
    if EncoderTask.CLASSIFY in service.encoder.facts.tasks:
        return await handlers.predict(http)
    return await _embed_or_compare(http)


@encoder_route
async def _embed_or_compare(incoming: IncomingRequest) -> Response:
    """The vectors of texts; or, where `inputs` is an object, how near sentences are to one."""
    content = await read_json(incoming.http, incoming.service.payload_limit)
    is_comparison = isinstance(content, dict) and isinstance(content.get("inputs"), dict)
    return await (similarity.similarity if is_comparison else handlers.embed)(incoming.http)
