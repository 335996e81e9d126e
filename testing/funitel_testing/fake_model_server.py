"""Imitation of the model server: `fake_model_server.py serve|download-weights|models FOLDER ...`.

What it does is told by `behaviour.json` in the folder of the model, which is read at each start; each start is a line
of `starts` there.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
UNFINISHED = "unfinished"


def behaviour() -> dict[str, Any]:
    path = FOLDER / "behaviour.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def download() -> None:
    told = behaviour()
    unfinished = FOLDER / UNFINISHED

    def discard(*_: object) -> None:
        unfinished.unlink(missing_ok=True)
        sys.exit(138)

    signal.signal(signal.SIGUSR1, discard)
    if "download_error" in told:
        print(f"error: {told['download_error']}", file=sys.stderr)
        sys.exit(1)
    unfinished.write_text("half of it")
    steps = 10
    for step in range(steps + 1):
        for label in ("downloading", *(("quantising",) if told.get("converts") else ())):
            content = {"label": label, "bytes": 100 * step, "total_bytes": 100 * steps}
            print(json.dumps({"progress": content}), flush=True)
        time.sleep(told.get("download_seconds", 0) / steps)
    unfinished.unlink()
    print(FOLDER.absolute())


def models() -> None:
    told = behaviour()
    if "--explain" in sys.argv:
        print(json.dumps({"model": str(FOLDER), "options": told.get("options", [])}))
        return
    weights = told.get("weights", 1000) // (2 if "int8" in sys.argv else 1)
    print(json.dumps({"weights": [weights], "blocks": [160], "block_size": 16, "context": 64, "states": []}))


def serve() -> None:
    told = behaviour()
    with (FOLDER / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    num_starts = len((FOLDER / "starts").read_text().splitlines())

    def stop(*_: object) -> None:
        time.sleep(told.get("stop_seconds", 0))
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    time.sleep(told.get("load_seconds", 0))
    if "load_error" in told and num_starts <= told.get("load_errors", 1_000_000):
        print(f"error: {told['load_error']}", file=sys.stderr)
        sys.exit(1)

    import grpc

    from funitel.proto import generate_pb2 as pb
    from funitel.proto import generate_pb2_grpc

    path = f"{flag('--uds-path')}-{flag('--rank')}"

    class Servicer(generate_pb2_grpc.TextGenerationServiceServicer):
        def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
            return pb.HealthResponse()

        def ServiceDiscovery(self, request: Any, context: grpc.ServicerContext) -> pb.ServiceDiscoveryResponse:
            return pb.ServiceDiscoveryResponse(urls=[f"unix://{path}"])

        def Sleep(self, request: pb.SleepRequest, context: grpc.ServicerContext) -> pb.SleepResponse:
            if told.get("sleepless"):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a sequence is there")
            return pb.SleepResponse(freed_bytes=told.get("freed", 100))

        def Wake(self, request: pb.WakeRequest, context: grpc.ServicerContext) -> pb.WakeResponse:
            with (FOLDER / "wakes").open("a") as wakes:
                wakes.write(f"{os.getpid()}\n")
            return pb.WakeResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{path}")
    server.start()
    time.sleep(told.get("lives_seconds", 3600))
    print("error: it was too much", file=sys.stderr)
    os._exit(1)


if __name__ == "__main__":
    {"download-weights": download, "serve": serve, "models": models}[sys.argv[1]]()
