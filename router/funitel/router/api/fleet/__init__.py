"""Routes of operators that launch, watch and terminate models; the control plane answers them."""

from functools import partial

from funitel.router.api.common.route_kinds import native
from funitel.router.api.common.schema_models import ModelRecord
from funitel.router.api.fleet import handlers
from funitel.router.api.fleet.schema import (
    AddReplicas,
    CachedModelList,
    CacheQuery,
    ChangeModel,
    ClusterInfo,
    EngineOptions,
    EventList,
    Instances,
    LaunchedModel,
    LaunchModel,
    LaunchProgressAnswer,
    ModelNameAnswer,
    RegisterModel,
    RegistrationDefinition,
    RegistrationList,
    RegistrationRecord,
    ReplicaList,
    WaitQuery,
    WorkerList,
)
from funitel.router.auth.access import Access

FAILURES = (400, 404, 409, 503)
BODY_FAILURES = (400, 404, 409, 413, 415, 503)
LOAD_FAILURES = (400, 404, 409, 499, 503, 507)

_asked = partial(native, access=Access.OPERATOR, method="GET", failures=FAILURES)
_told = partial(native, access=Access.OPERATOR, method="POST", failures=FAILURES)
_loads = partial(native, access=Access.OPERATOR, method="POST", failures=LOAD_FAILURES)
_ended = partial(native, access=Access.OPERATOR, method="DELETE", failures=FAILURES)
_forward = handlers.forward

MODEL = "/v1/models/{name}"
REGISTRATIONS = "/v1/model_registrations/{type}"

# Before the routes of OpenAI: `/v1/models/{model:path}` takes any path below it.
ROUTES = (
    native(
        "/v1/models",
        handlers.forward_body,
        "Launch a model",
        LaunchModel,
        LaunchedModel,
        method="POST",
        query=WaitQuery,
        access=Access.OPERATOR,
        failures=(*BODY_FAILURES, 499, 507),
    ),
    _asked("/v1/models/instances", _forward, "The replicas of all models", answer=Instances),
    _asked(f"{MODEL}/progress", _forward, "How far the launch of a model is", answer=LaunchProgressAnswer),
    _asked(f"{MODEL}/events", _forward, "What happened to a model", answer=EventList),
    _asked(f"{MODEL}/replicas", _forward, "The replicas of a model", answer=ReplicaList),
    _told(f"{MODEL}/cancel", _forward, "Cancel the launch of a model", answer=ModelNameAnswer),
    _loads(f"{MODEL}/load", _forward, "Load a model that is known", query=WaitQuery, answer=ModelRecord),
    _told(f"{MODEL}/unload", _forward, "Free the memory of a model, which stays known", answer=ModelRecord),
    _told(f"{MODEL}/sleep", _forward, "Free the KV memory of a model, and keep its weights", answer=ModelRecord),
    _loads(f"{MODEL}/wake", _forward, "Wake a model that sleeps", query=WaitQuery, answer=ModelRecord),
    native(
        f"{MODEL}/replicas",
        handlers.forward_body,
        "Add replicas to a model that serves",
        AddReplicas,
        ReplicaList,
        method="POST",
        access=Access.OPERATOR,
        failures=(*BODY_FAILURES, 507),
    ),
    _ended(f"{MODEL}/replicas/{{id}}", _forward, "Drain and stop a replica", answer=ModelNameAnswer),
    native(
        MODEL,
        handlers.forward_body,
        "Change weights, ttl, pinned, priority or the default",
        ChangeModel,
        method="PATCH",
        access=Access.OPERATOR,
        failures=BODY_FAILURES,
    ),
    _ended(MODEL, _forward, "Drain and stop a model, and forget it", answer=ModelNameAnswer),
    native(
        REGISTRATIONS,
        handlers.forward_body,
        "Register a model",
        RegisterModel,
        RegistrationRecord,
        method="POST",
        access=Access.OPERATOR,
        failures=BODY_FAILURES,
    ),
    _asked(REGISTRATIONS, _forward, "The models of a type that are registered", answer=RegistrationList),
    _asked(f"{REGISTRATIONS}/{{name}}", _forward, "One registration", answer=RegistrationDefinition),
    _ended(f"{REGISTRATIONS}/{{name}}", _forward, "Remove a registration", answer=ModelNameAnswer),
    *(
        _asked(f"/v1/engines/{kind}/{{model:path}}", _forward, "The same, in Xinference's shape", answer=EngineOptions)
        for kind in ("LLM", "embedding", "rerank")
    ),
    _asked("/v1/engines/{model:path}", _forward, "How a model can be served, with reasons", answer=EngineOptions),
    _asked("/v1/cache/models", _forward, "The models on the disk", answer=CachedModelList),
    _ended("/v1/cache/models", _forward, "Delete a model from the disk", query=CacheQuery, answer=CachedModelList),
    _asked("/v1/workers", _forward, "The machines on which replicas run", answer=WorkerList),
    _asked("/v1/cluster/info", _forward, "The same, in Xinference's shape", answer=ClusterInfo),
)
