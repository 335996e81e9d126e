"""Routes of hosting platforms: KServe, SageMaker, Vertex AI."""

from funitel.router.api.common.route_kinds import native_fact, native_probe, native_work
from funitel.router.api.native.schema import GenerateResponse, StreamResponse
from funitel.router.api.platforms import bare_url, kserve, sagemaker, vertex
from funitel.router.api.platforms.schema import (
    BareUrlRequest,
    KserveLive,
    KserveMetadata,
    KserveRequest,
    KserveResponse,
    SagemakerRequest,
    SagemakerResponse,
    SagemakerStreamResponse,
    VertexRequest,
    VertexResponse,
)
from funitel.router.middleware.operation import ModelUse

KSERVE_MODEL = "/v2/models/{name}/versions/{version}"
VERTEX = native_work("/vertex", vertex.vertex, "Vertex AI: the texts of all instances", VertexRequest, VertexResponse)
ROUTES = (
    native_work(
        "/",
        bare_url.serve_task,
        "Generate; streamed if `stream` is true, else an array of one completion. Encoders: what they are for",
        BareUrlRequest,
        GenerateResponse,
        event=StreamResponse,
        is_array=True,
        model=ModelUse.ANY,
    ),
    native_work(
        "/invocations",
        sagemaker.invocations,
        "SageMaker: a body of `/` or of a route of OpenAI's, told apart by its fields",
        SagemakerRequest,
        SagemakerResponse,
        event=SagemakerStreamResponse,
        model=ModelUse.ANY,
    ),
    VERTEX,
    native_fact("/v2", kserve.server_metadata, "KServe: the server", answer=KserveMetadata),
    native_probe("/v2/health/live", kserve.live, "KServe: whether the router answers", answer=KserveLive),
    native_probe(
        "/v2/health/ready", kserve.ready, "KServe: whether every shard answers", answer=KserveLive, failures=(503,)
    ),
    native_fact(KSERVE_MODEL, kserve.model_metadata, "KServe: the model", answer=KserveMetadata, failures=(404,)),
    native_probe(
        f"{KSERVE_MODEL}/ready",
        kserve.model_ready,
        "KServe: whether every shard of the model answers",
        answer=KserveLive,
        failures=(404, 503),
    ),
    native_work(
        f"{KSERVE_MODEL}/infer", kserve.infer, "KServe: the completions of all inputs", KserveRequest, KserveResponse
    ),
)
