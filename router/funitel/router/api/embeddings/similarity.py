"""Handle `/similarity`, `/v1/rerank` and `/embed_all`: what is made of the vectors of texts and of their tokens."""

import asyncio
import uuid
from collections.abc import Sequence
from operator import mul

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import BatchSizeExceeded, InvalidRequest
from funitel.proto.step import EncoderInput, EncoderTask
from funitel.router.api.common.body import json_answer, read_json
from funitel.router.api.common.handler import IncomingRequest, encoder_route
from funitel.router.api.embeddings.handlers import (
    EncoderCall,
    embed_texts,
    encodings_of,
    numbers,
    rerank_texts,
    sigmoid,
)
from funitel.router.api.embeddings.schema import (
    EmbedAllRequest,
    PromptedBody,
    SimilarityRequest,
    SimilarityResponse,
)
from funitel.router.api.embeddings.schema_rerank import (
    DocumentsRequest,
    DocumentsResponse,
    RankedDocument,
    RankedResult,
    RerankUsage,
)
from funitel.router.api.openai.schema_completions import GivenPrompt
from funitel.router.core.request_context import drawn
from funitel.router.encoder.engine import BYTES, Encoded
from funitel.router.encoder.service import TokenizeOptions

MAX_NUMBERS = 2**22  # of one answer of `/embed_all`: up to 90 MB, within --max-total-unread-bytes
SLICE = 2**15  # numbers that are computed with, or written, before other requests have their turn


@encoder_route
async def similarity(incoming: IncomingRequest) -> Response:
    """`/similarity`: how near each of some sentences is to one sentence."""
    call = EncoderCall.of(incoming)
    call.encoder.check_task(EncoderTask.EMBED)
    body = await incoming.read(SimilarityRequest)
    parameters = body.parameters or PromptedBody()
    prompt = call.encoder.prompts.pick(parameters.prompt_name)
    texts = _Compared("inputs.source_sentence", body.inputs.source_sentence, "inputs.sentences", body.inputs.sentences)
    encoded = await _embed_compared(incoming.http, call, texts, prompt, parameters.cut)
    return json_answer(SimilarityResponse(await _cosines(encoded)), call.headers(encoded))


@encoder_route
async def rerank_documents(incoming: IncomingRequest) -> Response:
    """`/v1/rerank`: documents by how well they answer a query, the best first.

    The score is that of a classifier with one class, or of an embedding model the cosine.
    """
    call = EncoderCall.of(incoming)
    is_classifier = EncoderTask.EMBED not in call.encoder.facts.tasks
    if is_classifier:
        call.encoder.check_ranker()
    body = await incoming.read(DocumentsRequest)
    if body.priority is not None:
        call.priority = body.priority
    texts = _Compared("query", body.query, "documents", body.documents)
    cut = body.cut(call.encoder.engine.limits.max_input_tokens)
    if is_classifier:
        encoded = await _classify_compared(incoming.http, call, texts, cut)
        scores = [numbers(row, 1)[0] for row in encoded.rows]
        if body.use_activation is not False:
            scores = [sigmoid(score) for score in scores]
    else:
        encoded = await _embed_compared(incoming.http, call, texts, call.encoder.prompts.default, cut)
        scores = await _cosines(encoded)
    answer = DocumentsResponse(
        id=drawn("id", lambda: f"rerank-{uuid.uuid4().hex}"),
        model=call.service.shown_model(body.model),
        usage=RerankUsage(prompt_tokens=call.num_tokens, total_tokens=call.num_tokens),
        results=_best(body, scores),
    )
    return json_answer(answer, call.headers(encoded))


@encoder_route
async def rerank(incoming: IncomingRequest) -> Response:
    """`/rerank`: a body of TEI's; or, where it has `documents`, of vLLM's route of the same name."""
    content = await read_json(incoming.http, incoming.service.payload_limit)
    is_documents = isinstance(content, dict) and "documents" in content
    return await (rerank_documents if is_documents else rerank_texts)(incoming.http)


@encoder_route
async def embed_all(incoming: IncomingRequest) -> Response:
    """`/embed_all`: a vector for each token of each text, as the last layer leaves it."""
    call = EncoderCall.of(incoming)
    call.encoder.check_task(EncoderTask.EMBED_ALL)
    body = await incoming.read(EmbedAllRequest)
    prompt = call.encoder.prompts.pick(body.prompt_name)
    encodings = await encodings_of(call, body.texts, prompt, TokenizeOptions("inputs", body.cut))
    num_tokens, width = sum(len(each.ids) for each in encodings), call.encoder.facts.token_width
    if num_tokens * width > MAX_NUMBERS:
        raise BatchSizeExceeded(
            f"`inputs` must have at most {MAX_NUMBERS // width} tokens, each of which gets a vector. "
            f"Given: {num_tokens}",
            "inputs",
        )
    inputs = [EncoderInput(input_ids=each.ids) for each in encodings]
    encoded = await call.encode(incoming.http, EncoderTask.EMBED_ALL, inputs)
    return Response(await _written(encoded), headers=call.headers(encoded), media_type="application/json")


class _Compared:
    """One text, and others to compare with it; errors name the fields."""

    def __init__(self, source_field: str, source: str, field: str, others: Sequence[str]) -> None:
        if not source:
            raise InvalidRequest(f"`{source_field}` cannot be empty", source_field)
        self.source_field, self.source = source_field, source
        self.field, self.others = field, others


async def _embed_compared(
    http: HttpRequest, call: EncoderCall, texts: _Compared, prompt: str, cut: str | None
) -> Encoded:
    """Have the vectors of the one text and the others computed, of length 1 each."""
    call.encoder.check_count(texts.field, len(texts.others))
    source = await encodings_of(call, [GivenPrompt(texts.source)], prompt, TokenizeOptions(texts.source_field, cut))
    others = [GivenPrompt(text) for text in texts.others]
    encodings = source + await encodings_of(call, others, prompt, TokenizeOptions(texts.field, cut))
    return await embed_texts(http, call, encodings, call.encoder.facts.width, is_normalized=True)


async def _classify_compared(http: HttpRequest, call: EncoderCall, texts: _Compared, cut: str | None) -> Encoded:
    """Have the pairs of the one text and each of the others scored."""
    call.encoder.check_count(texts.field, len(texts.others))
    pairs = [(texts.source, text) for text in texts.others]
    encodings = await call.encoder.tokens_of(pairs, TokenizeOptions(texts.field, cut))
    inputs = [EncoderInput(input_ids=each.ids, type_ids=each.type_ids) for each in encodings]
    return await call.encode(http, EncoderTask.CLASSIFY, inputs)


def _best(body: DocumentsRequest, scores: Sequence[float]) -> list[RankedResult]:
    places = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
    is_shown = body.return_documents is not False
    return [
        RankedResult(
            index=place,
            document=RankedDocument(text=body.documents[place]) if is_shown else None,
            relevance_score=scores[place],
        )
        for place in places
    ]


async def _cosines(encoded: Encoded) -> list[float]:
    """The cosines between the first vector and each other one, all of length 1; a vector of zeros is near nothing."""
    source, *others = encoded.rows
    width = len(source) // BYTES
    expected = numbers(source, width)
    found = []
    for place, row in enumerate(others):
        found.append(max(-1.0, min(1.0, sum(map(mul, expected, numbers(row, width))))))
        if place % (SLICE // width + 1) == 0:
            await asyncio.sleep(0)
    return found


async def _written(encoded: Encoded) -> bytes:
    """The vectors of all tokens as JSON: an array for each text, with an array for each token."""
    size = encoded.width * BYTES
    step = max(1, SLICE // encoded.width) * size
    texts = []
    for text in encoded.rows:
        slices = []
        for start in range(0, len(text), step):
            part = text[start : start + step]
            rows = [numbers(part[place : place + size], encoded.width) for place in range(0, len(part), size)]
            slices.append(to_json(rows)[1:-1])
            await asyncio.sleep(0)
        texts.append(b"[" + b",".join(slices) + b"]")
    return b"[" + b",".join(texts) + b"]"
