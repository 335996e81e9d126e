"""Routes of encoders: TEI's and OpenAI's."""

from funitel.router.api.common.route_kinds import native_work, openai_work
from funitel.router.api.embeddings import handlers
from funitel.router.api.embeddings.schema import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    PredictRequest,
    PredictResponse,
    RerankRequest,
    RerankResponse,
)

ROUTES = (
    native_work(
        path="/embed",
        handler=handlers.embed,
        summary="Encoders: a vector for each text",
        body=EmbedRequest,
        answer=EmbedResponse,
    ),
    native_work(
        path="/rerank",
        handler=handlers.rerank,
        summary="Encoders: texts by how well they answer a query",
        body=RerankRequest,
        answer=RerankResponse,
    ),
    native_work(
        path="/predict",
        handler=handlers.predict,
        summary="Encoders: the classes of texts and pairs, or what may stand behind a mask",
        body=PredictRequest,
        answer=PredictResponse,
    ),
    openai_work(
        path="/v1/embeddings",
        handler=handlers.embeddings,
        summary="Encoders: a vector for each text",
        body=EmbeddingsRequest,
        answer=EmbeddingsResponse,
    ),
)
