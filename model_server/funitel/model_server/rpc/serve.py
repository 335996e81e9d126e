"""Serve one rank: resolve and load the model, listen over gRPC and the step socket, shut down on a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor as ThreadExecutor
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from funitel.model_server.device.memory import within_memory
from funitel.model_server.engines.llama_cpp.load import load_llama_cpp
from funitel.model_server.executor.executor import Executor
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.encoder import holds_encoder, load_encoder
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.rpc.compute_threads import ComputeLoop, InlineRunner, Runner, ThreadedRunner, drained
from funitel.model_server.rpc.dispatcher import Dispatcher
from funitel.model_server.rpc.listen_address import listen_address, remove_files, step_socket_path
from funitel.model_server.rpc.servicer import EncoderServicer, Servicer, make_server
from funitel.model_server.rpc.step_socket_server import StepServer
from funitel.model_server.settings import LLAMA_CPP, ModelServerSettings
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)


class CallServer:
    """Takes calls from `start` to `stop`; both are awaited on the loop it was made on, as are the results of its calls.

    Args:
        executor: computes.
        world_size: ranks of the model.
        step_path: where the step socket is to be; empty for none.
        compute: the compute thread. On a CPU, but for pipeline stages, a loop of its own takes it up until `stop`.
        on_fatal: see `Dispatcher`; called on the loop this is made on.
    """

    def __init__(
        self,
        executor: Executor,
        world_size: int,
        step_path: str,
        compute: ThreadExecutor,
        on_fatal: Callable[[FunitelError], None],
    ) -> None:
        here = asyncio.get_running_loop()

        def tell(error: FunitelError) -> None:
            here.call_soon_threadsafe(on_fatal, error)

        is_inline = executor.options.device.type == "cpu" and not executor.sampling.describing_waits
        self._compute_loop = ComputeLoop(compute) if is_inline else None
        self._answers = ThreadPoolExecutor(1, "funitel-answers")  # idle, and without a thread, beside such a loop
        self._runner: Runner = (
            InlineRunner() if self._compute_loop is not None else ThreadedRunner(compute, self._answers)
        )
        loop = self._compute_loop.loop if self._compute_loop is not None else here
        self.dispatcher = Dispatcher(executor, world_size, self._runner, loop, tell)
        self._steps = StepServer(self.dispatcher, step_path) if step_path else None

    async def start(self) -> None:
        """Take calls, and listen on the step socket.

        Raises:
            StartupError: its path is too long or not ours.
        """
        if self._compute_loop is not None:
            self._compute_loop.start()
        if self._steps is not None:
            await self._run(self._steps.start())

    async def stop(self) -> None:
        """Answer the calls that have come, close connections, and release the compute thread; after gRPC is stopped."""
        await self._run(self._drain())
        self._answers.shutdown()
        if self._compute_loop is not None:
            await self._compute_loop.stop()

    async def _drain(self) -> None:
        if self._steps is not None:
            self._steps.stop_listening()
        await drained(self._runner)
        if self._steps is not None:
            await self._steps.stop()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._compute_loop is not None:
            await self._compute_loop.run(work)
        else:
            await work


STOP_GRACE_SECONDS = 5.0


def run(settings: ModelServerSettings) -> FunitelError | None:
    """`serve` in a loop of uvloop, which costs a step half of what asyncio's own does."""
    return uvloop.run(serve(settings))


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
    is_llama_cpp = settings.engine == LLAMA_CPP
    if holds_encoder(folder) and not is_llama_cpp:
        encoder, info = await loop.run_in_executor(compute, within_memory(load_encoder), settings, folder)
        servicer, leave = EncoderServicer(encoder, info, [url], compute), encoder.parallel.leave
    else:
        load = load_llama_cpp if is_llama_cpp else load_generator
        executor, info = await loop.run_in_executor(compute, within_memory(load), settings, folder)
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
    """The folder of the model; where it is told through a pipe that ends without it, this process ends."""
    if settings.folder_fd is not None:
        with os.fdopen(settings.folder_fd, "rb") as told:
            line = told.readline()
        if not line.endswith(b"\n"):
            os._exit(0)  # what would have told it has given up, and has said why
        return resolve(os.fsdecode(line[:-1])).folder
    return resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir).folder


async def _in_time(work: Awaitable[None], failures: list[FunitelError]) -> None:
    """Wait for work of the compute thread; end the process here if that thread hangs in a collective."""
    try:
        async with asyncio.timeout(STOP_GRACE_SECONDS):
            await work
    except TimeoutError:
        print(f"error: {failures[0].message if failures else 'a step did not end'}", file=sys.stderr, flush=True)
        os._exit(1 if failures else 0)
