"""An instant shard and its clients in lock step: a token is made when every client has the one before.

Nothing is then sent together or apart by chance, so what a router does for a token is the same each time.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, models, pre_tokenizers

from funitel.proto import generate_pb2 as pb
from funitel.proto.step_socket import SUFFIX
from funitel_testing.instant_shard import STAMP_DIGITS, InstantShard, StepSocket

STAMP = re.compile(rb" \d{%d}" % STAMP_DIGITS)
MAX_SECONDS = 60.0
ROUTES: dict[str, dict[str, Any]] = {
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": 1000}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000, "stream": True},
}


class LockstepShard(InstantShard):
    """Makes `limit` tokens at most, and none before clients have received all that were made."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 0)
        self._num_received = self._num_made = 0
        self._limit = math.inf
        self._moved = asyncio.Condition()

    def begin(self, num_tokens: int) -> None:
        """Streams that begin now end with so many tokens."""
        self._num_tokens, self._num_made, self._num_received, self._limit = num_tokens, 0, 0, math.inf

    async def advance(self, num_tokens: int) -> None:
        """Make so many tokens from now on, wait until clients have them, and make no more."""
        async with self._moved:
            self._limit = limit = self._num_made + num_tokens
            self._moved.notify_all()
            await self._moved.wait_for(lambda: self._num_received >= limit)

    async def run_on(self) -> None:
        """Make all that are left."""
        async with self._moved:
            self._limit = math.inf
            self._moved.notify_all()

    async def _turn(self, request: Any) -> None:
        if not isinstance(request, pb.PrefillRequest | pb.DecodeRequest):
            await super()._turn(request)
            return
        async with self._moved:
            await self._moved.wait_for(lambda: self._may_go(request))
        await super()._turn(request)

    def _may_go(self, request: pb.PrefillRequest | pb.DecodeRequest) -> bool:
        if isinstance(request, pb.DecodeRequest) and not any(batch.id in self._batches for batch in request.batches):
            return True  # planned before the router knew that the last token was the last
        return self._num_made <= self._num_received and self._num_made < self._limit

    def _step(self, *arguments: Any) -> bytes:
        rows = arguments[1]
        before = sum(len(row.texts) for row in rows)
        payload = super()._step(*arguments)
        self._num_made += sum(len(row.texts) for row in rows) - before
        return payload

    async def receive(self, count: int) -> None:
        """Clients have got so many tokens more."""
        async with self._moved:
            self._num_received += count
            self._moved.notify_all()


@asynccontextmanager
async def listening(path: str) -> AsyncIterator[LockstepShard]:
    """A shard in this process."""
    shard = LockstepShard(path)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((shard.handler(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    steps = await asyncio.get_running_loop().create_unix_server(lambda: StepSocket(shard), path + SUFFIX)
    try:
        yield shard
    finally:
        steps.close()
        await server.stop(None)


def write_model(folder: Path) -> None:
    """All of a model that a router reads."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


async def stream(
    port: int, path: str, shard: LockstepShard, hear: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """Read a stream to its end; `hear` is awaited with the number of tokens at each, before the next may come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(ROUTES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer, num_tokens = b"", 0
    async with asyncio.timeout(MAX_SECONDS):
        while piece := await reader.read(1 << 16):
            answer += piece
            found = len(STAMP.findall(answer)) - num_tokens
            num_tokens += found
            if found and hear is not None:
                await hear(num_tokens)
            await shard.receive(found)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise AssertionError(answer[:500])
    return answer
