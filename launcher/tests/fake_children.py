"""Imitations of the model server and the router, for tests: `fake_children.py model_server|router ...`.

What each does is told by the variable FAKE, a JSON object of behaviours by process name ("download",
"shard-0", "replica-1-shard-0", "router"); what each lived through is appended to the file FAKE_LOG, one JSON object a
line.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn


class Fake:
    """One process: its name, its behaviour and its diary."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}")).get(name, {})
        self.is_stopping = False  # an Event might be held by the interrupted code
        self.num_sigterms = 0

    def note(self, event: str, **more: Any) -> None:
        entry = {"process": self.name, "event": event, "pid": os.getpid(), "time": time.time(), **more}
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps(entry) + "\n")

    def begin(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.on_sigterm())
        signal.signal(signal.SIGUSR1, lambda *_: self.on_sigusr1())
        self.note("start", argv=sys.argv[2:], environ=dict(os.environ))
        if "child" in self.behaviour:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.note("grandchild", child=child.pid)
        for line in self.behaviour.get("says", []):
            print(line, file=sys.stderr, flush=True)
        time.sleep(self.delay())
        if self.num_starts() == self.behaviour.get("fails_at_start"):
            sys.exit(1)
        if "fails" in self.behaviour:
            sys.exit(self.behaviour["fails"])

    def delay(self) -> float:
        """Seconds to start: one for each start in `delays`, or `delay` for every one."""
        delays = self.behaviour.get("delays", [self.behaviour.get("delay", 0)])
        return float(delays[min(self.num_starts(), len(delays)) - 1])

    def num_starts(self) -> int:
        """How often a process of this name was started."""
        with open(os.environ["FAKE_LOG"]) as log:
            entries = [json.loads(line) for line in log if line.endswith("\n")]  # another may be writing the last one
        return sum(entry["event"] == "start" and entry["process"] == self.name for entry in entries)

    def drain(self) -> None:
        """Take so many seconds, or until so many SIGTERMs have come, or until an event is in the diary so often."""
        time.sleep(self.behaviour.get("drains", 0))
        while self.num_sigterms < self.behaviour.get("drains_until", 0):
            time.sleep(0.01)
        process, event, count = self.behaviour.get("drains_past", ("", "", 0))
        while True:
            with open(os.environ["FAKE_LOG"]) as log:
                entries = [json.loads(line) for line in log if line.endswith("\n")]
            if sum((entry["process"], entry["event"]) == (process, event) for entry in entries) >= count:
                return
            time.sleep(0.05)

    def on_sigterm(self) -> None:
        self.note("sigterm")
        self.num_sigterms += 1
        if not self.behaviour.get("stubborn"):
            self.is_stopping = True

    def on_sigusr1(self) -> None:
        self.note("sigusr1")
        self.is_stopping = True

    def live(self) -> NoReturn:
        """Serve until SIGTERM, until the parent is gone or until the behaviour says to die."""
        self.note("ready")
        born = time.monotonic()
        while not self.is_stopping:
            time.sleep(0.05)
            if "--exit-with-parent" in sys.argv and os.getppid() != int(flag("--exit-with-parent")):
                os._exit(0)
            if time.monotonic() - born > self.behaviour.get("dies_after", float("inf")):
                self.die()
        self.drain()
        self.note("stopped")
        os._exit(0)

    def die(self) -> None:
        self.note("dies")
        for line in self.behaviour.get("last_words", []):
            print(line, file=sys.stderr, flush=True)
        if "code" in self.behaviour:
            os._exit(self.behaviour["code"])
        os.kill(os.getpid(), signal.SIGKILL)


def answer_health(path: str) -> None:
    """Answer Health over gRPC, and nothing else."""
    # Imported here: a test starts many processes, and only shards need it, once they serve.
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    from funitel.proto import generate_pb2 as pb
    from funitel.proto import generate_pb2_grpc

    class Health(generate_pb2_grpc.TextGenerationServiceServicer):
        def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
            return pb.HealthResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(Health(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{path}")
    server.start()


def answer_http(listener: socket.socket, is_healthy: bool) -> None:
    """Answer GET /health with 200 if healthy, and any other request with 404."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            request = lines.readline()
            while lines.readline().strip():
                pass
            found = is_healthy and request.split()[1:2] == [b"/health"]
            status = b"200 OK" if found else b"404 Not Found"
            connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def download() -> None:
    fake = Fake("download")
    fake.begin()
    fake.note("fetched")
    print("some chatter on stdout")
    print(fake.behaviour.get("folder", "/tmp/the-model"))


def shard() -> None:
    rank = flag("--rank")
    _, is_further, replica = flag("--uds-path").rpartition("-replica-")
    fake = Fake(f"replica-{replica}-shard-{rank}" if is_further else f"shard-{rank}")
    fake.begin()
    if "--folder-fd" in sys.argv:
        with os.fdopen(int(flag("--folder-fd")), "rb") as told:
            folder = told.readline()
        if not folder:
            os._exit(0)
        fake.note("told", folder=folder.decode().strip())
    answer_health(f"{flag('--uds-path')}-{rank}")
    fake.live()


def router() -> None:
    fake = Fake("router")
    fake.begin()
    if "--ready-fd" in sys.argv:
        os.write(int(flag("--ready-fd")), b"\n")
    listener = socket.socket(fileno=int(flag("--listen-fd")))
    listener.setblocking(True)
    is_healthy = not fake.behaviour.get("unhealthy")
    threading.Thread(target=answer_http, args=(listener, is_healthy), daemon=True).start()
    fake.live()


if __name__ == "__main__":
    {"download-weights": download, "serve": shard}.get(sys.argv[2], router)()
