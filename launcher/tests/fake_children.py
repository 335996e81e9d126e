"""Imitations of the model server and the router, and the real keeper, for tests: `fake_children.py model_server ...`.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from funitel.proto.keeper import messages
from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.messages import FINISHED_CODE, Kind, Packet, RouterHello
from funitel.proto.process.deployment_file import end_with_launcher, is_launcher_gone

answered_health = threading.Event()
OTHER_KEEPER_CODE = 76  # of `OtherKeeper`, whose import would take long


class Fake:
    """One process: its name, its behaviour and its diary."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}")).get(name, {})
        self.is_stopping = False  # an Event might be held by the interrupted code
        self.num_sigterms = 0
        self.server: object = None  # of a shard
        if "version_file" in self.behaviour:  # of the messages, as of code that was installed meanwhile
            messages.VERSION = int(Path(self.behaviour["version_file"]).read_text())

    def note(self, event: str, **more: Any) -> None:
        entry = {"process": self.name, "event": event, "pid": os.getpid(), "time": time.time(), **more}
        with open(os.environ["FAKE_LOG"], "ab", buffering=0) as log:
            log.write(json.dumps(entry).encode() + b"\n")  # at once: others write too

    def begin(self, *, notes_signals: bool = True) -> None:
        if notes_signals:
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

    def is_orphan(self) -> bool:
        """Whether there is no launcher any more."""
        return "--exit-with-parent" in sys.argv and is_launcher_gone(int(flag("--exit-with-parent")), file_flag())

    def on_sigusr1(self) -> None:
        self.note("sigusr1")
        self.is_stopping = True

    def live(self) -> NoReturn:
        """Serve until SIGTERM, until the parent is gone or until the behaviour says to die.

        The first router lives `dies_after` seconds from its first answer about its health on: ending before would be
        the end of a deployment that was never ready.
        """
        self.note("ready")
        if "--deployment-file" in sys.argv:
            end_with_launcher(int(flag("--exit-with-parent")), file_flag())
        born = time.monotonic()
        is_first_router = self.name == "router" and self.num_starts() == 1
        while not self.is_stopping:
            time.sleep(0.05)
            if is_first_router and not answered_health.is_set():
                born = time.monotonic()
            if "--deployment-file" not in sys.argv and self.is_orphan():
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


def answer_health(path: str) -> object:
    """Answer Health over gRPC, and nothing else, as long as the result is kept."""
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
    return server


def answer_http(accept: Callable[[], tuple[socket.socket, object]], is_healthy: bool) -> None:
    """Answer GET /health with 200 if healthy, GET /pid with the process id, and any other request with 404."""
    while True:
        connection, _ = accept()
        connection.setblocking(True)
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            request = lines.readline()
            while lines.readline().strip():
                pass
            path, body = request.split()[1:2], b""
            if path == [b"/pid"]:
                body = str(os.getpid()).encode()
            found = is_healthy and path in ([b"/health"], [b"/pid"])
            status = b"200 OK" if found else b"404 Not Found"
            length = b"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
            connection.sendall(b"HTTP/1.1 " + status + length + body)
            connection.shutdown(socket.SHUT_RDWR)  # the keeper has it too
            if found and path == [b"/health"]:
                answered_health.set()


def from_keeper(fake: "Fake", feeds: bool) -> Callable[[], tuple[socket.socket, object]]:
    """Greet the keeper as a router does; the result waits for its connections."""
    channel = Channel.to(flag("--keeper"))
    hello = RouterHello(int(flag("--generation")), feeds, messages.VERSION)
    channel.send(Packet(Kind.HELLO, raw=hello.encode()), 5)
    left: list[Packet] = []  # connections of an earlier router, none of which has an answer yet
    while (packet := channel.receive_within(30)).kind is not Kind.END:
        if packet.kind is Kind.REFUSED:
            be_refused(fake, packet, feeds)
        left += [packet] if packet.kind is Kind.CONNECTION else []
    fake.note("greeted", keeper=channel.peer[0])
    channel.send(Packet(Kind.READY), 5)
    before: list[int] = []

    def accept() -> tuple[socket.socket, object]:
        while True:
            try:
                if before:  # what was answered last
                    channel.send(Packet(Kind.RELEASE, before.pop()), 5)
                packet = left.pop() if left else channel.receive_within(600)
            except ChannelLost:
                return from_keeper_again(fake, feeds=True)()
            if packet.kind is Kind.YIELD:
                fake.note("yields")
                os._exit(0)
            if packet.kind is Kind.CONNECTION:
                before.append(packet.connection)
                return socket.socket(fileno=packet.fds[0]), None

    return accept


def from_keeper_again(fake: "Fake", *, feeds: bool = False) -> Callable[[], tuple[socket.socket, object]]:
    while True:
        with suppress(OSError, ChannelLost):
            return from_keeper(fake, feeds)
        time.sleep(0.05)


def be_refused(fake: "Fake", packet: Packet, feeds: bool) -> NoReturn:
    """End as a router does, after the connections that it has."""
    if feeds:
        fake.note("finishes")
        time.sleep(fake.behaviour.get("finishes", 0))
        os._exit(FINISHED_CODE)
    print(f"error: refused: {packet.raw.decode()}", file=sys.stderr, flush=True)
    os._exit(OTHER_KEEPER_CODE if packet.number else 1)


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def file_flag() -> str | None:
    return flag("--deployment-file") if "--deployment-file" in sys.argv else None


def keeper() -> None:
    """Run the real one."""
    fake = Fake("keeper")
    from funitel.launcher.keeper.__main__ import main

    fake.begin(notes_signals=False)  # a SIGTERM before the real one handles it would be lost
    del sys.argv[1]
    code = main()
    fake.note("stopped")
    sys.exit(code)


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
    fake.server = answer_health(f"{flag('--uds-path')}-{rank}")
    fake.live()


def router() -> None:
    fake = Fake("router")
    fake.begin()
    if "--keeper" in sys.argv:
        accept = from_keeper_again(fake)
    else:
        listener = socket.socket(fileno=int(flag("--listen-fd")))
        listener.setblocking(True)
        accept = listener.accept
    if "--ready-fd" in sys.argv:
        os.write(int(flag("--ready-fd")), b"\n")
    is_healthy = not fake.behaviour.get("unhealthy")
    threading.Thread(target=answer_http, args=(accept, is_healthy), daemon=True).start()
    fake.live()


if __name__ == "__main__":
    {"download-weights": download, "serve": shard}.get(sys.argv[2], keeper if sys.argv[1] == "keeper" else router)()
