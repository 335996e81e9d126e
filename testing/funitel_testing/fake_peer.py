"""A server for `benchmarks/peers.py` that starts as a process: FakeStreams on a port, with /health.

    python -m funitel_testing.fake_peer PORT LOG [--tokens-per-word 2] [--refuse]

Every generation request is appended to LOG as a line of JSON, so that a test sees what was asked and in which order.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
from typing import Any

from funitel_testing.fake_streams import FakeStreams


class FakePeer(FakeStreams):
    """Answers at once; each request becomes a line of `log`."""

    log = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        again = asyncio.StreamReader()
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        again.feed_data(head + await reader.readexactly(length))
        again.feed_eof()
        await super().handle(again, writer)

    @staticmethod
    def prompt_of(body: Mapping[str, Any]) -> Any:
        """The text of a request; it is written down."""
        with open(FakePeer.log, "a") as log:
            log.write(json.dumps({"prompt": body["prompt"], "max_tokens": body["max_tokens"]}) + "\n")
        return body["prompt"]


async def serve(port: int, peer: FakePeer) -> None:
    """Answer until the process is ended."""
    server = await asyncio.start_server(peer.handle, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("log")
    parser.add_argument("--tokens-per-word", type=int, default=1)
    parser.add_argument("--refuse", action="store_true")
    arguments = parser.parse_args()
    if arguments.refuse:
        raise SystemExit("unknown argument")
    FakePeer.log = arguments.log
    asyncio.run(serve(arguments.port, FakePeer(counts_by="prompt", tokens_per_word=arguments.tokens_per_word)))
