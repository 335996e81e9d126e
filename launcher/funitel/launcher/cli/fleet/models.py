"""`funitel list`, `terminate`, `cancel`, `unload`, `sleep`, `wake`, `replicas` and `workers`."""

import json
import time
from typing import Any

from funitel.launcher.cli.fleet.requests import (
    MODELS,
    api_of,
    bytes_text,
    list_of,
    path_of,
    print_table,
    span_text,
    stdout,
)
from funitel.launcher.cli.fleet.settings import (
    CancelSettings,
    ListSettings,
    ReplicasSettings,
    SleepSettings,
    TerminateSettings,
    UnloadSettings,
    WakeSettings,
    WorkersSettings,
)
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import FunitelError

_LAUNCHING = ("queued", "downloading", "converting", "loading", "warming_up")


def list_all(settings: ListSettings) -> None:
    """Print the models of a server."""
    api = api_of(settings)
    models = list_of(api.send("GET", MODELS), "data", api)
    if any("state" not in each for each in models):
        raise FunitelError(f"{api.url} serves one model, or is not a funitel server: it says nothing of states")
    if settings.json:
        print(json.dumps(models))
    elif not models:
        print("no model: funitel launch MODEL launches one")
    else:
        columns = ["NAME", "STATE", "MEMORY", "REPLICAS", "LAST USED", "TTL", "NOTES"]
        print_table(stdout(), columns, [_row(each) for each in models])


def _row(model: dict[str, Any]) -> list[str]:
    state, replicas = str(model.get("state")), model.get("replicas") or []
    if state in _LAUNCHING:
        state += f" {100 * (model.get('progress') or 0):.0f} %"
    ready = sum(each.get("state") == "ready" for each in replicas)
    last_used = model.get("last_used")
    flags = {"default": "is_default", "pinned": "pinned", "static": "is_static"}
    notes = [word for word, name in flags.items() if model.get(name)]
    return [
        str(model.get("name") or model.get("id")),
        state,
        bytes_text(model.get("bytes")),
        f"{ready}/{len(replicas)}",
        "-" if last_used is None else f"{span_text(max(0.0, time.time() - last_used))} ago",
        span_text(model.get("ttl")),
        " ".join([*notes, *([str(model["error"])] if model.get("error") else [])]),
    ]


def terminate(settings: TerminateSettings) -> None:
    """End a model."""
    api_of(settings).send("DELETE", path_of(settings.name))
    print(f"{one_line(settings.name)} is terminated")


def cancel(settings: CancelSettings) -> None:
    """Cancel a launch."""
    _post(api_of(settings), settings.name, "cancel")
    print(f"the launch of {one_line(settings.name)} is cancelled")


def unload(settings: UnloadSettings) -> None:
    """Free the memory of a model."""
    _post(api_of(settings), settings.name, "unload")
    print(f"{one_line(settings.name)} is unloaded")


def sleep(settings: SleepSettings) -> None:
    """Put a model to sleep."""
    _post(api_of(settings), settings.name, "sleep")
    print(f"{one_line(settings.name)} sleeps")


def wake(settings: WakeSettings) -> None:
    """Wake a model."""
    _post(api_of(settings), settings.name, "wake")
    print(f"{one_line(settings.name)} is ready")


def _post(api: Api, name: str, action: str) -> None:
    api.send("POST", path_of(name, action), {})


def replicas(settings: ReplicasSettings) -> None:
    """List, add or remove replicas."""
    api, path = api_of(settings), path_of(settings.name, "replicas")
    if settings.remove is not None:
        api.send("DELETE", f"{path}/{settings.remove}")
        print(f"replica {settings.remove} of {one_line(settings.name)} is removed")
        return
    if settings.add is not None:
        weight = {} if settings.weight is None else {"weight": settings.weight}
        found = list_of(api.send("POST", path, {"count": settings.add, **weight}), "replicas", api)
    else:
        found = list_of(api.send("GET", path), "replicas", api)
    if settings.json:
        print(json.dumps(found))
        return
    rows = [
        [
            str(each.get("id")),
            str(each.get("state")),
            f"{each.get('weight', 1.0):g}",
            str(each.get("worker")),
            ",".join(map(str, each.get("pids") or [])) or "-",
        ]
        for each in found
    ]
    print_table(stdout(), ["ID", "STATE", "WEIGHT", "WORKER", "PIDS"], rows)


def workers(settings: WorkersSettings) -> None:
    """List the machines."""
    api = api_of(settings)
    found = list_of(api.send("GET", "/v1/workers"), "workers", api)
    if settings.json:
        print(json.dumps(found))
        return
    rows = [
        [
            str(each.get("name")),
            "alive" if each.get("is_alive") else "lost",
            str(each.get("address") or "-"),
            str(each.get("cores")),
            str(len(each.get("gpus") or [])),
            f"{bytes_text(each.get('free_memory_bytes'))} of {bytes_text(each.get('memory_bytes'))}",
            " ".join(f"{replica.get('model')}/{replica.get('replica')}" for replica in each.get("replicas") or []),
        ]
        for each in found
    ]
    print_table(stdout(), ["NAME", "STATE", "ADDRESS", "CORES", "GPUS", "FREE MEMORY", "REPLICAS"], rows)
