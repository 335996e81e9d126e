"""Handle the routes of encoders: `/embed`, `/rerank`, `/predict` and `/v1/embeddings`."""

import base64
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import FunitelError, InvalidRequest
from funitel.proto.step import EncoderInput, EncoderTask
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, encoder_route
from funitel.router.api.embeddings.schema import (
    DEFAULT_TOP_K,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbeddingsUsage,
    EmbedRequest,
    EmbedResponse,
    Prediction,
    PredictRequest,
    PredictResponse,
    Rank,
    RerankRequest,
    RerankResponse,
)
from funitel.router.api.openai.schema_completions import GivenPrompt
from funitel.router.auth.accounts import TokenCounts, charged
from funitel.router.core import request_context
from funitel.router.core.request import is_background
from funitel.router.encoder.engine import BYTES, Encoded
from funitel.router.encoder.service import EncoderService, TokenizeOptions
from funitel.router.encoder.tokenize import EncodedText
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import run_until_disconnect


@encoder_route
async def embed(incoming: IncomingRequest) -> Response:
    """`/embed`: a vector for each text."""
    call = EncoderCall.of(incoming)
    call.encoder.check_task(EncoderTask.EMBED)
    body = await incoming.read(EmbedRequest)
    prompt = call.encoder.prompts.pick(body.prompt_name)
    options = TokenizeOptions("inputs", body.cut)
    encodings = await encodings_of(call, body.texts, prompt, options)
    width = _width(call.encoder, body.dimensions)
    encoded = await embed_texts(incoming.http, call, encodings, width, is_normalized=body.normalize)
    answer = EmbedResponse.model_construct([list(numbers(row, width)) for row in encoded.rows])
    return json_answer(answer, call.headers(encoded))


@encoder_route
async def embeddings(incoming: IncomingRequest) -> Response:
    """`/v1/embeddings`: the same in OpenAI's words."""
    call = EncoderCall.of(incoming)
    call.encoder.check_task(EncoderTask.EMBED)
    body = await incoming.read(EmbeddingsRequest)
    if body.priority is not None and not is_background(incoming.arrived.key):
        call.priority = body.priority
    encodings = await encodings_of(call, body.texts, call.encoder.prompts.default, TokenizeOptions("input"))
    width = _width(call.encoder, body.dimensions)
    encoded = await embed_texts(incoming.http, call, encodings, width, is_normalized=True)
    answer = EmbeddingsResponse.model_construct(
        data=[
            Embedding.model_construct(index=place, embedding=_shown(row, width, body.encoding_format))
            for place, row in enumerate(encoded.rows)
        ],
        model=call.service.shown_model(body.model),
        usage=EmbeddingsUsage(prompt_tokens=call.num_tokens, total_tokens=call.num_tokens),
    )
    return json_answer(answer, call.headers(encoded))


@encoder_route
async def rerank_texts(incoming: IncomingRequest) -> Response:
    """`/rerank` as TEI has it: texts by how well they answer a query, the best first."""
    call = EncoderCall.of(incoming)
    call.encoder.check_ranker()
    body = await incoming.read(RerankRequest)
    call.encoder.check_count("texts", len(body.texts))
    if not body.query:
        raise InvalidRequest("`query` cannot be empty", "query")
    pairs = [(body.query, text) for text in body.texts]
    encodings = await call.encoder.tokens_of(pairs, TokenizeOptions("texts", body.cut))
    inputs = [EncoderInput(input_ids=each.ids, type_ids=each.type_ids) for each in encodings]
    encoded = await call.encode(incoming.http, EncoderTask.CLASSIFY, inputs)
    scores = [numbers(row, 1)[0] for row in encoded.rows]
    if not body.raw_scores:
        scores = [sigmoid(score) for score in scores]
    places = sorted(range(len(scores)), key=lambda place: -scores[place])
    ranks = [
        Rank(index=place, score=scores[place], text=body.texts[place] if body.return_text else None) for place in places
    ]
    return json_answer(RerankResponse(ranks), call.headers(encoded))


@encoder_route
async def predict(incoming: IncomingRequest) -> Response:
    """`/predict`: the classes of texts and pairs; or the tokens that may stand behind a mask."""
    call = EncoderCall.of(incoming)
    task = call.encoder.check_task(EncoderTask.CLASSIFY, EncoderTask.FILL)
    body = await incoming.read(PredictRequest)
    call.encoder.check_count("inputs", len(body.texts))
    encodings = await call.encoder.tokens_of(body.texts, TokenizeOptions("inputs", body.cut))
    if task is EncoderTask.FILL:
        encoded, predictions = await _fill(incoming.http, call, body, encodings)
    else:
        encoded, predictions = await _classify(incoming.http, call, body, encodings)
    return json_answer(PredictResponse(predictions if body.is_batch else predictions[0]), call.headers(encoded))


# What a call is made of

# GenAI's word for a task, where it has one.
_OPERATIONS = {
    EncoderTask.EMBED: "embeddings",
    EncoderTask.EMBED_ALL: "embeddings",
    EncoderTask.CLASSIFY: "classify",
    EncoderTask.FILL: "fill_mask",
}


@dataclass(slots=True)
class EncoderCall:
    """One request to an encoder, from its arrival on; instants are of the monotonic clock."""

    service: Service
    encoder: EncoderService
    arrived: Arrival
    priority: int
    num_tokens: int = 0
    validation_seconds: float = 0.0

    @classmethod
    def of(cls, incoming: IncomingRequest) -> "EncoderCall":
        """Begin with a request.

        Raises:
            NotReady: the shards do not answer yet.
            WrongTask: a model that generates is served.
        """
        return cls(incoming.service, incoming.service.encoder, incoming.arrived, incoming.arrived.priority)

    async def encode(self, http: HttpRequest, task: EncoderTask, inputs: Sequence[EncoderInput]) -> Encoded:
        """Have the texts encoded, unless the client leaves."""
        self.validation_seconds = time.monotonic() - self.arrived.at
        lengths = [len(text.input_ids) for text in inputs]
        self.num_tokens = sum(lengths)
        context = request_context.current()
        context.operation, context.prompt_tokens = _OPERATIONS[task], self.num_tokens
        context.validation_seconds = self.validation_seconds
        taken = TokenCounts(prompt=self.num_tokens)  # a client that leaves pays: texts are computed whole, and soon
        most = TokenCounts(prompt=self.num_tokens)
        account, model, journal = self.arrived.account, self.service.model_id, context.journal
        async with charged(account, model, lambda: most, lambda: taken, journal=journal):
            work = self.encoder.engine.encode(
                task,
                inputs,
                priority=self.priority,
                deadline=self.arrived.deadline,
                reservation=self.arrived.reservation,
                was_admitted=journal.is_replayed,
            )
            try:
                encoded = await run_until_disconnect(http.receive, work)
            except FunitelError as error:
                if error.retry_after:  # refused
                    taken = TokenCounts()
                raise
        context.timings = encoded.timings
        self.service.metrics.observe_texts(self.validation_seconds, encoded.timings, lengths)
        return encoded

    def headers(self, encoded: Encoded) -> dict[str, str]:
        """What the answer cost: times in milliseconds."""
        queue, inference = encoded.timings.queue_seconds, encoded.timings.inference_seconds
        return {
            "x-compute-type": self.service.settings.compute_type or self.encoder.engine.compute_type,
            "x-compute-tokens": str(self.num_tokens),
            "x-total-time": _milliseconds(self.validation_seconds + queue + inference),
            "x-tokenization-time": _milliseconds(self.validation_seconds),
            "x-queue-time": _milliseconds(queue),
            "x-inference-time": _milliseconds(inference),
        }


async def encodings_of(
    call: EncoderCall, given: Sequence[GivenPrompt], prompt: str, options: TokenizeOptions
) -> list[EncodedText]:
    """The tokens of texts behind a prompt; tokens that are given are taken as they are."""
    call.encoder.check_count(options.field, len(given))
    if given[0].ids is None:
        if not all(text.text for text in given):  # a prompt would hide it
            return await call.encoder.tokens_of([text.text for text in given], options)
        return await call.encoder.tokens_of([prompt + text.text for text in given], options)
    max_tokens, num_known = call.encoder.engine.limits.max_input_tokens, call.service.tokenizer.num_tokens
    encodings = []
    for text in given:
        ids = text.ids or ()
        unknown = next((token_id for token_id in ids if token_id >= num_known), None)
        if unknown is not None:
            raise InvalidRequest(
                f"`{options.field}` names tokens by id, < {num_known}. Given: {unknown}", options.field
            )
        if options.truncate is not None:
            ids = ids[-max_tokens:] if options.truncate == "left" else ids[:max_tokens]
        encodings.append(EncodedText(ids))
    call.encoder.check_lengths(encodings, options.field)
    return encodings


def _width(encoder: EncoderService, dimensions: int | None) -> int:
    """How many numbers of a vector are wanted."""
    width = encoder.facts.width
    if dimensions is not None and dimensions > width:
        raise InvalidRequest(f"`dimensions` must be <= {width}, those of the model. Given: {dimensions}", "dimensions")
    return dimensions or width


async def embed_texts(
    http: HttpRequest, call: EncoderCall, encodings: Sequence[EncodedText], width: int, *, is_normalized: bool
) -> Encoded:
    """Have the vector of each text computed, of which `width` numbers are kept."""
    inputs = [EncoderInput(input_ids=each.ids, dimensions=width, is_normalized=is_normalized) for each in encodings]
    return await call.encode(http, EncoderTask.EMBED, inputs)


async def _classify(
    http: HttpRequest, call: EncoderCall, body: PredictRequest, encodings: Sequence[EncodedText]
) -> tuple[Encoded, list[list[Prediction]]]:
    facts = call.encoder.facts
    inputs = [EncoderInput(input_ids=each.ids, type_ids=each.type_ids) for each in encodings]
    encoded = await call.encode(http, EncoderTask.CLASSIFY, inputs)
    predictions = []
    for row in encoded.rows:
        scores: Sequence[float] = numbers(row, len(facts.labels))
        if not body.raw_scores:
            is_each_alone = facts.is_multi_label or len(facts.labels) == 1
            scores = [sigmoid(score) for score in scores] if is_each_alone else _softmax(scores)
        pairs = sorted(zip(scores, facts.labels, strict=True), key=lambda pair: -pair[0])
        predictions.append([Prediction(score=score, label=label) for score, label in pairs[: body.top_k]])
    return encoded, predictions


async def _fill(
    http: HttpRequest, call: EncoderCall, body: PredictRequest, encodings: Sequence[EncodedText]
) -> tuple[Encoded, list[list[Prediction]]]:
    if body.raw_scores:
        raise InvalidRequest("`raw_scores` is for classes; what stands behind a mask has probabilities", "raw_scores")
    count = body.top_k or DEFAULT_TOP_K
    mask_id = call.encoder.texts.mask_id
    inputs = []
    for place, each in enumerate(encodings):
        masks = [at for at, token_id in enumerate(each.ids) if token_id == mask_id]
        if len(masks) != 1:
            at = f"item {place} of `inputs`" if len(encodings) > 1 else "`inputs`"
            raise InvalidRequest(f"{at} must have one mask token. Given: {len(masks)}", "inputs")
        inputs.append(EncoderInput(input_ids=each.ids, type_ids=each.type_ids, mask_place=masks[0], top_n=count))
    encoded = await call.encode(http, EncoderTask.FILL, inputs)
    predictions = []
    for row, ids in zip(encoded.rows, encoded.ids, strict=True):
        words = await call.encoder.texts.words(ids[:count])
        rows = zip(numbers(row, len(words)), words, ids, strict=False)
        predictions.append([Prediction(score=score, label=word, token=token_id) for score, word, token_id in rows])
    return encoded, predictions


def numbers(row: bytes, count: int) -> tuple[float, ...]:
    """The first numbers of a row."""
    return struct.unpack(f"<{count}f", row[: count * BYTES])


def _shown(row: bytes, count: int, encoding_format: str | None) -> list[float] | str:
    """The first numbers of a row in an encoding format of OpenAI's."""
    if encoding_format == "base64":
        return base64.b64encode(row[: count * BYTES]).decode()
    return list(numbers(row, count))


def sigmoid(score: float) -> float:
    """Return a score of a classifier as a number within 0..1."""
    power = math.exp(-abs(score))
    return (1 if score >= 0 else power) / (1 + power)


def _softmax(scores: Sequence[float]) -> list[float]:
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
