"""Routes of encoders: TEI's and OpenAI's."""

from functools import partial

from funitel.router.api.common import route_kinds
from funitel.router.api.embeddings import handlers, similarity
from funitel.router.api.embeddings.schema import (
    EmbedAllRequest,
    EmbedAllResponse,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    PredictRequest,
    PredictResponse,
    RerankRequest,
    RerankResponse,
    SimilarityRequest,
    SimilarityResponse,
)
from funitel.router.api.embeddings.schema_rerank import DocumentsRequest, DocumentsResponse
from funitel.router.middleware.operation import ModelUse

native_work = partial(route_kinds.native_work, model=ModelUse.ENCODES)
openai_work = partial(route_kinds.openai_work, model=ModelUse.ENCODES)

ROUTES = (
    native_work("/embed", handlers.embed, "Encoders: a vector for each text", EmbedRequest, EmbedResponse),
    native_work(
        "/embed_all",
        similarity.embed_all,
        "Encoders: a vector for each token of each text",
        EmbedAllRequest,
        EmbedAllResponse,
    ),
    native_work(
        "/similarity",
        similarity.similarity,
        "Encoders: how near sentences are to one",
        SimilarityRequest,
        SimilarityResponse,
    ),
    native_work(
        "/rerank", similarity.rerank, "Encoders: texts by how well they answer a query", RerankRequest, RerankResponse
    ),
    native_work(
        "/predict",
        handlers.predict,
        "Encoders: the classes of texts and pairs, or what may stand behind a mask",
        PredictRequest,
        PredictResponse,
    ),
    *(
        openai_work(
            path, handlers.embeddings, "Encoders: a vector for each text", EmbeddingsRequest, EmbeddingsResponse
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
    *(
        openai_work(
            path,
            similarity.rerank_documents,
            "Encoders: documents by how well they answer a query, in the shape of Cohere, Jina and vLLM",
            DocumentsRequest,
            DocumentsResponse,
        )
        for path in ("/v1/rerank", "/v2/rerank")
    ),
)
