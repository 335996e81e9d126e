"""Sleep and Wake on all ranks of a replica: shards in this process that say what they are asked."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from funitel.launcher.executors.shard_calls import sleep, wake
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc
from funitel.proto.errors import FunitelError, ResourceExhausted, ShardFailed, WrongState
from funitel.proto.security.tls import MutualTls, Pair
from funitel_testing.certificates import Authority

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Shard(generate_pb2_grpc.TextGenerationServiceServicer):
    """One rank: the calls that came, and the status that it refuses one of them with."""

    urls: list[str]
    freed_bytes: int = 10
    refuses: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)

    async def _note(self, name: str, context: Context) -> None:
        self.calls.append(name)
        if name in self.refuses:
            await context.abort(*self.refuses[name])

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        self.levels.append(request.level)
        await self._note("Sleep", context)
        return pb.SleepResponse(freed_bytes=self.freed_bytes)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        await self._note("Wake", context)
        return pb.WakeResponse()


Serve = Callable[..., Any]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serves so many ranks on Unix sockets: the addresses, and the ranks."""
    async with AsyncExitStack() as stack:

        async def ranks(size: int) -> tuple[list[str], list[Shard]]:
            urls = [f"unix://{tmp_path}/{rank}" for rank in range(size)]
            shards = [Shard(urls, freed_bytes=10 + rank) for rank in range(size)]
            for url, shard in zip(urls, shards, strict=True):
                server = grpc.aio.server()
                generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]
                server.add_insecure_port(url.replace("unix://", "unix:"))
                await server.start()
                stack.push_async_callback(server.stop, None)
            return urls, shards

        yield ranks


async def test_every_rank_is_asked_whether_all_are_named_or_the_first(serve: Serve) -> None:
    urls, shards = await serve(3)
    assert await sleep(urls[:1]) == 33
    assert await sleep(urls) == 33
    await wake(urls[:1])
    assert [shard.calls for shard in shards] == [["Sleep", "Sleep", "Wake"]] * 3
    assert [shard.levels for shard in shards] == [[1, 1]] * 3


async def test_one_rank_alone(serve: Serve) -> None:
    urls, (shard,) = await serve(1)
    assert await sleep(urls) == 10
    await wake(urls)
    assert shard.calls == ["Sleep", "Wake"]


async def test_ranks_that_sleep_are_woken_up_where_another_refuses(serve: Serve) -> None:
    urls, shards = await serve(3)
    shards[1].refuses["Sleep"] = grpc.StatusCode.FAILED_PRECONDITION, "the shard cannot sleep: 2 sequences are here"
    with pytest.raises(WrongState, match="^shard rank 1: the shard cannot sleep: 2 sequences are here$"):
        await sleep(urls[:1])
    assert [shard.calls for shard in shards] == [["Sleep", "Wake"], ["Sleep"], ["Sleep", "Wake"]]


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted, "^shard rank 1: no room$"),
        (grpc.StatusCode.UNIMPLEMENTED, WrongState, "^shard rank 1: its engine can neither sleep nor wake up$"),
        (grpc.StatusCode.INTERNAL, FunitelError, "^shard rank 1: no room$"),
    ],
)
async def test_what_a_rank_says_is_one_line(
    serve: Serve, status: grpc.StatusCode, kind: type[FunitelError], message: str
) -> None:
    urls, shards = await serve(2)
    shards[1].refuses = {"Sleep": (status, "no\nroom"), "Wake": (status, "no\nroom")}
    for call in (sleep, wake):
        with pytest.raises(kind, match=message):
            await call(urls)


async def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    for call in (sleep, wake):
        with pytest.raises(ShardFailed, match=rf"^shard rank 0 at unix://{tmp_path}/gone does not answer: ") as failed:
            await call([f"unix://{tmp_path}/gone"])
        assert "\n" not in failed.value.message


async def test_certificates_over_tcp(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("shard")
    tls = MutualTls(Pair(files.cert, files.key, "--shard-tls"), authority.ca)
    server, shard = grpc.aio.server(), Shard([])
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    shard.urls = [f"tcp://localhost:{port}"]
    assert await sleep(shard.urls, tls) == 10
    with pytest.raises(ShardFailed):
        await sleep(shard.urls)
    await server.stop(None)
