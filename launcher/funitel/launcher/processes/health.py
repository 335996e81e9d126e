"""Check the health of a shard over gRPC and of the router over HTTP or HTTPS."""

import asyncio
import ssl
from math import inf

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import StartupError
from funitel.proto.generate_pb2_grpc import TextGenerationServiceStub

ANSWER_SECONDS = 5.0


async def shard_answers(socket_path: str, max_busy_seconds: float = inf) -> bool:
    """Whether the shard on this Unix socket answers Health, and its current call is not older than the maximum."""
    # A new channel each time: a channel that failed to connect backs off exponentially.
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        try:
            health: pb.HealthResponse = await TextGenerationServiceStub(channel).Health(  # type: ignore[no-untyped-call]
                pb.HealthRequest(), timeout=ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError:
            return False
    return health.busy_ns <= max_busy_seconds * 1e9


async def router_answers(hostname: str, port: int, context: ssl.SSLContext | None = None) -> bool:
    """Whether `GET /health` answers 200; over HTTPS if a context is given.

    Raises:
        StartupError: the router refuses the certificate of the context.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return b" 200 " in await _status_line(hostname, port, context)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return False
        raise StartupError(
            f"the router refuses the launcher's certificate ({error.reason}): give --tls-probe-cert and "
            "--tls-probe-key of an authority in --tls-client-ca"
        ) from error
    except (OSError, TimeoutError):
        return False


async def _status_line(hostname: str, port: int, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(reachable(hostname), port, ssl=context)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()


def reachable(hostname: str) -> str:
    """Address under which this machine reaches a server that listens on `hostname`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hostname, hostname)
