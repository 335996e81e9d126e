"""An imitation of the model server for agents: `fake_shard.py serve MODEL --listen HOST:PORT ...`, or download-weights.

The variable FAKE is a JSON object: `folder` is what a download prints, `fails_download` its error, `delay` its seconds;
`dies` is the last word of a shard that ends with code 7 once it is told to by a file of the name `die-RANK` in the
folder DIARY; `stubborn` ignores SIGTERM. Each process notes what it lives through in the folder DIARY.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BEHAVIOUR: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
DIARY = Path(os.environ["DIARY"])


def note(event: str, **more: Any) -> None:
    with (DIARY / "diary").open("a") as diary:
        diary.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\n")


def flag(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def download() -> None:
    note("download", argv=sys.argv[1:])
    time.sleep(BEHAVIOUR.get("delay", 0))
    if "fails_download" in BEHAVIOUR:
        print(f"error: {BEHAVIOUR['fails_download']}", file=sys.stderr)
        sys.exit(1)
    print(BEHAVIOUR.get("folder", "/tmp"))


def answer_health() -> object:
    """The server, which stops once nothing refers to it."""
    import grpc

    from funitel.proto import generate_pb2 as pb
    from funitel.proto import generate_pb2_grpc

    class Health(generate_pb2_grpc.TextGenerationServiceServicer):
        def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
            return pb.HealthResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(Health(), server)  # type: ignore[no-untyped-call]
    if flag("--shard-tls-cert"):
        files = [Path(flag(f"--shard-tls-{name}")).read_bytes() for name in ("ca", "key", "cert")]
        credentials = grpc.ssl_server_credentials([(files[1], files[2])], files[0], require_client_auth=True)
        server.add_secure_port(flag("--listen"), credentials)
    else:
        server.add_insecure_port(flag("--listen"))
    server.start()
    return server


def serve() -> None:
    rank = flag("--rank")
    signal.signal(signal.SIGTERM, lambda *_: stop(rank))
    note("start", rank=rank, argv=sys.argv[1:], environ=dict(os.environ))
    server = answer_health()
    note("ready", rank=rank)
    while os.getppid() == int(flag("--exit-with-parent")):
        if (DIARY / f"die-{rank}").exists():
            (DIARY / f"die-{rank}").unlink()
            print(f"error: {BEHAVIOUR.get('dies', 'told to')}", flush=True)
            os._exit(7)
        time.sleep(0.02)
    del server
    os._exit(0)


def stop(rank: str) -> None:
    note("sigterm", rank=rank)
    if not BEHAVIOUR.get("stubborn"):
        os._exit(0)


if __name__ == "__main__":
    {"download-weights": download, "serve": serve}[sys.argv[1]]()
