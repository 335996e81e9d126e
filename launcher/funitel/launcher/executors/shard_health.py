"""Health of shards that listen on TCP."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import SettingsError
from funitel.proto.generate_pb2_grpc import TextGenerationServiceStub
from funitel.proto.security.tls import MutualTls

ANSWER_SECONDS = 5.0


async def tcp_shard_answers(address: str, tls: MutualTls | None, max_busy_seconds: float) -> bool:
    """Whether the shard at `tcp://host:port` answers Health, and its current call is not older than the maximum."""
    target = address.removeprefix("tcp://")
    # A new channel each time: a channel that failed to connect backs off exponentially.
    options = [("grpc.use_local_subchannel_pool", 1)]
    try:
        channel = (
            grpc.aio.insecure_channel(target, options)
            if tls is None
            else grpc.aio.secure_channel(target, tls.channel_credentials(), options)
        )
    except SettingsError:  # its files are being replaced
        return False
    async with channel:
        try:
            health: pb.HealthResponse = await TextGenerationServiceStub(channel).Health(  # type: ignore[no-untyped-call]
                pb.HealthRequest(), timeout=ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError:
            return False
    return health.busy_ns <= max_busy_seconds * 1e9


async def ranks_answer(record: Mapping[str, Any], tls: MutualTls | None) -> bool:
    """Whether every rank of the record of a replica answers its health check."""
    busy = float(record["max_busy_seconds"])
    checks = (tcp_shard_answers(rank["address"], tls, busy) for rank in record["ranks"])
    return all(await asyncio.gather(*checks))
