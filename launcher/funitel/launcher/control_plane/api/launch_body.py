"""The body of a launch in our form, and the body of a change."""

from typing import Any

from funitel.launcher.control_plane.api.xinference_launch import is_xinference, of_xinference
from funitel.launcher.control_plane.checks import MAX_INTEGER, Fields, check_name, number_of, wrong
from funitel.launcher.control_plane.model_settings import check_flags
from funitel.launcher.control_plane.records import LaunchRequest, ModelChange, ModelType
from funitel.proto.errors import InvalidRequest

ENGINES = ("native", "transformers", "llama_cpp")
EXECUTORS = ("local", "worker", "ray")
MAX_REPLICAS, MAX_SHARDS, MAX_RETRIES = 1024, 4096, 1000


def launch_of(body: Any) -> LaunchRequest:
    """The launch that a body asks for, in our form or in Xinference's.

    Raises:
        InvalidRequest: a field is unknown or wrong; `param` names it.
    """
    return of_xinference(body) if is_xinference(body) else _ours(body)


def _ours(body: Any) -> LaunchRequest:
    given = Fields(body)
    name = given.text("name")
    settings = given.mapping("settings") or {}
    request = LaunchRequest(
        model=given.required("model"),
        name=name,
        replicas=given.whole("replicas", 1, MAX_REPLICAS) or 1,
        num_shard=given.whole("num_shard", 1, MAX_SHARDS),
        quantize=given.text("quantize"),
        dtype=given.text("dtype"),
        ttl=given.number("ttl", above=0),
        pinned=given.boolean("pinned") or False,
        engine=given.text("engine", ENGINES),
        executor=given.text("executor", EXECUTORS),
        worker=given.text("worker"),
        partition=given.text("partition"),
        layers=_layers(given),
        request_limit=given.whole("request_limit", 1),
        weight=_weight(given, 1.0),
        priority=given.whole("priority", -MAX_INTEGER) or 0,
        retries=given.whole("retries", 0, MAX_RETRIES) or 0,
        model_type=given.text("model_type", tuple(ModelType)),
        settings=settings,
    )
    given.finish()
    check_name(request.served_name, "model" if name is None else "name")
    check_flags(settings)
    if request.worker is not None and request.executor == "local":
        raise InvalidRequest("`worker` names a machine, and `executor` is local: leave one out", "worker")
    return request


def _layers(given: Fields) -> str | None:
    """Layers of each stage: a list of whole numbers, or a text of them with commas between."""
    value = given.raw("layers")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise wrong("layers", "must be a list of whole numbers", value)
    return ",".join(map(str, value))


def _weight(given: Fields, default: float) -> float:
    value = given.number("weight", above=0)
    return default if value is None else value


def change_of(body: Any) -> ModelChange:
    """The change that the body of a PATCH asks for; raises InvalidRequest."""
    given = Fields(body)
    weights: dict[int, float] = {}
    for replica, weight in (given.mapping("weights") or {}).items():
        field = f"weights.{replica}"
        if not (replica.isascii() and replica.isdigit()) or int(replica) > MAX_INTEGER:
            raise InvalidRequest(f"`{field}` must be named by the id of a replica. Given: {replica!r}", field)
        weights[int(replica)] = number_of(weight, field, least=0)
    change = ModelChange(
        weights=weights,
        ttl=given.number("ttl", above=0),
        removes_ttl=isinstance(body, dict) and "ttl" in body and body["ttl"] is None,
        pinned=given.boolean("pinned"),
        priority=given.whole("priority", -MAX_INTEGER),
        is_default=given.boolean("is_default"),
    )
    given.finish()
    if change == ModelChange():
        raise InvalidRequest("the body changes nothing: give weights, ttl, pinned, priority or is_default")
    return change


def replicas_of(body: Any) -> tuple[int, float | None]:
    """How many replicas a body adds, and the weight of each, if it says one; raises InvalidRequest."""
    given = Fields({} if body is None else body)
    count, weight = given.whole("count", 1, MAX_REPLICAS) or 1, given.number("weight", above=0)
    given.finish()
    return count, weight
