"""Routes of hosting platforms: KServe, SageMaker, Vertex AI."""

from funitel.router.api.common.route_kinds import native_fact, native_probe, native_work
from funitel.router.api.platforms import kserve, sagemaker_vertex
from funitel.router.api.platforms.schema import (
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

KSERVE_MODEL = "/v2/models/{name}/versions/{version}"
VERTEX = native_work(
    path="/vertex",
    handler=sagemaker_vertex.vertex,
    summary="Vertex AI: the texts of all instances",
    body=VertexRequest,
    answer=VertexResponse,
)
ROUTES = (
    native_work(
        path="/invocations",
        handler=sagemaker_vertex.invocations,
        summary="SageMaker: a body of `/` or of a route of OpenAI's, told apart by its fields",
        body=SagemakerRequest,
        answer=SagemakerResponse,
        event=SagemakerStreamResponse,
    ),
    VERTEX,
    native_fact(path="/v2", handler=kserve.server_metadata, summary="KServe: the server", answer=KserveMetadata),
    native_probe(
        path="/v2/health/live", handler=kserve.live, summary="KServe: whether the router answers", answer=KserveLive
    ),
    native_probe(
        path="/v2/health/ready",
        failures=(503,),
        handler=kserve.ready,
        summary="KServe: whether every shard answers",
        answer=KserveLive,
    ),
    native_fact(path=KSERVE_MODEL, handler=kserve.model_metadata, summary="KServe: the model", answer=KserveMetadata),
    native_probe(
        path=f"{KSERVE_MODEL}/ready",
        failures=(503,),
        handler=kserve.ready,
        summary="KServe: whether every shard answers",
        answer=KserveLive,
    ),
    native_work(
        path=f"{KSERVE_MODEL}/infer",
        handler=kserve.infer,
        summary="KServe: the completions of all inputs",
        body=KserveRequest,
        answer=KserveResponse,
    ),
)
