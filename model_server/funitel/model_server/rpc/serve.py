"""Serve one rank: resolve and load the model, listen over gRPC and the step socket, shut down on a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.encoder import holds_encoder, load_encoder
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.rpc.call_server import CallServer
from funitel.model_server.rpc.listen_address import listen_address, remove_files, step_socket_path
from funitel.model_server.rpc.servicer import EncoderServicer, Servicer, make_server
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0


async def serve(settings: ModelServerSettings) -> FunitelError | None:
    """Serve until SIGTERM or SIGINT, or until the ranks have lost each other; the error of the latter is returned.

    Raises:
        StartupError: the checkpoint, the settings and the machine do not fit together.
    """
    loop = asyncio.get_running_loop()
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    folder = await loop.run_in_executor(None, _resolve, settings)
    address, url = listen_address(settings)
    failures: list[FunitelError] = []
    stop = asyncio.Event()

    def fail(error: FunitelError) -> None:
        failures.append(error)
        stop.set()

    servicer: Servicer | EncoderServicer
    call_server: CallServer | None = None
    if holds_encoder(folder):
        encoder, info = await loop.run_in_executor(compute, load_encoder, settings, folder)
        servicer, leave = EncoderServicer(encoder, info, [url], compute), encoder.parallel.leave
    else:
        executor, info = await loop.run_in_executor(compute, load_generator, settings, folder)
        urls = await loop.run_in_executor(compute, executor.parallel.exchange, url)
        info = replace(info, step_socket=step_socket_path(settings))
        call_server = CallServer(executor, info.world_size, info.step_socket, compute, fail)
        servicer, leave = Servicer(executor, info, urls, call_server.dispatcher), executor.parallel.leave
    server = make_server(servicer, address, is_traced=settings.otlp_endpoint is not None, tls=settings.shard_tls)
    try:
        if call_server is not None:
            await call_server.start()
        await server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        logger.info("listening url=%s", url)
        await stop.wait()
    finally:
        await server.stop(STOP_GRACE_SECONDS)
        remove_files(settings)
        if call_server is not None:
            await _in_time(call_server.stop(), failures)
    await _in_time(loop.run_in_executor(compute, leave), failures)
    compute.shutdown()
    return failures[0] if failures else None


def _resolve(settings: ModelServerSettings) -> Path:
    return resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir).folder


async def _in_time(work: Awaitable[None], failures: list[FunitelError]) -> None:
    """Wait for work of the compute thread; end the process here if that thread hangs in a collective."""
    try:
        async with asyncio.timeout(STOP_GRACE_SECONDS):
            await work
    except TimeoutError:
        print(f"error: {failures[0].message if failures else 'a step did not end'}", file=sys.stderr, flush=True)
        os._exit(1 if failures else 0)
