"""Imitation of the router of `funitel up`: follows the snapshots of a control socket, and says what it uses.

    python -m funitel_testing.fake_router --control-socket PATH --listen-fd N|--keeper PATH ...

It attaches each replica that is ready, and releases what is drained or gone. On its port it answers 200 with its pid
to anything. A file `router.jsonl` beside the socket gets a line for each snapshot.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from funitel.proto.errors import OtherKeeper
from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.messages import FINISHED_CODE, Kind, Packet, RouterHello

RETRY_SECONDS = 0.1
UNUSED = ("draining", "sleeping")


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class FakeRouterProcess:
    """One watcher of a control socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.attached: set[tuple[str, int]] = set()

    async def post(self, what: str, **content: Any) -> int:
        """Send one message; returns the status."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        body = json.dumps(content).encode()
        head = f"POST /v1/fleet/{what} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    async def watch(self) -> None:
        """Follow snapshots until the connection breaks."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(b"GET /v1/fleet/watch HTTP/1.1\r\nHost: x\r\n\r\n")
            while (await reader.readline()).strip():
                pass
            self.attached.clear()  # what is used is said again
            rest = b""
            while (size := int((await reader.readline()).strip() or b"0", 16)) > 0:
                rest += await reader.readexactly(size)
                await reader.readline()
                *lines, rest = rest.split(b"\n")
                for line in filter(None, lines):
                    await self.follow(json.loads(line))
        finally:
            writer.close()

    async def follow(self, snapshot: dict[str, Any]) -> None:
        with Path(self.path).with_name("router.jsonl").open("a") as log:
            log.write(json.dumps({"pid": os.getpid(), **snapshot}) + "\n")
        there = {(model["name"], each["id"]): each for model in snapshot["models"] for each in model["replicas"]}
        for key, replica in there.items():
            if replica["state"] == "ready" and key not in self.attached:
                self.attached.add(key)
                await self.post("attached", model=key[0], replica=key[1], seconds=0.1)
            if replica["state"] in UNUSED:
                self.attached.discard(key)
                await self.post("released", model=key[0], replica=key[1])
        self.attached &= {*there}

    async def run(self) -> None:
        while True:
            try:
                await self.watch()
            except (OSError, EOFError, ValueError, asyncio.IncompleteReadError):
                await asyncio.sleep(RETRY_SECONDS)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request with the pid."""
    while (await reader.readline()).strip():
        pass
    body = str(os.getpid()).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def serve_kept(path: str, generation: int) -> None:
    """Answer on connections of the keeper, and of the next one."""
    feeds = False
    while True:
        try:
            channel = Channel.to(path)
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)
            continue
        channel.send(Packet(Kind.HELLO, raw=RouterHello(generation, feeds).encode()), 5)
        with suppress(ChannelLost):
            while True:
                packet = channel.receive()
                if packet is None:
                    await asyncio.sleep(0.01)
                elif packet.kind is Kind.END:
                    channel.send(Packet(Kind.READY), 5)
                    feeds = True
                elif packet.kind is Kind.REFUSED:
                    os._exit(FINISHED_CODE if feeds else OtherKeeper.exit_code)
                elif packet.kind is Kind.YIELD:
                    os._exit(0)
                elif packet.kind is Kind.CONNECTION:
                    await answer(*await asyncio.open_connection(sock=socket.socket(fileno=packet.fds[0])))
                    channel.send(Packet(Kind.RELEASE, packet.connection), 5)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if "--keeper" in sys.argv:
        serving = [asyncio.create_task(serve_kept(flag("--keeper"), int(flag("--generation"))))]
    else:
        listener = socket.socket(fileno=int(flag("--listen-fd")))
        listener.setblocking(False)
        await asyncio.start_server(answer, sock=listener)
        serving = []
    print("listening", flush=True)
    following = asyncio.create_task(FakeRouterProcess(flag("--control-socket")).run())
    await stop.wait()
    for task in (following, *serving):
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
