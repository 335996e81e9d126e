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
    native_work("/embed", handlers.embed, "Encoders: a vector for each text", EmbedRequest, EmbedResponse),
    native_work(
        "/rerank", handlers.rerank, "Encoders: texts by how well they answer a query", RerankRequest, RerankResponse
    ),
    native_work(
        "/predict",
        handlers.predict,
        "Encoders: the classes of texts and pairs, or what may stand behind a mask",
        PredictRequest,
        PredictResponse,
    ),
    openai_work(
        "/v1/embeddings", handlers.embeddings, "Encoders: a vector for each text", EmbeddingsRequest, EmbeddingsResponse
    ),
)
