"""Run the dispatcher of one rank on the event loop that suits its device, with its step socket."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor as ThreadExecutor
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from funitel.model_server.executor.executor import Executor
from funitel.model_server.rpc.compute_threads import ComputeLoop, InlineRunner, Runner, ThreadedRunner, drained
from funitel.model_server.rpc.dispatcher import Dispatcher
from funitel.model_server.rpc.step_socket_server import StepServer
from funitel.proto.errors import FunitelError


class CallServer:
    """Takes calls from `start` to `stop`; both are awaited on the loop it was made on, as are the results of its calls.

    Args:
        executor: computes.
        world_size: ranks of the model.
        step_path: where the step socket is to be; empty for none.
        compute: the compute thread. On a CPU it is taken up by a loop of its own until `stop`.
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

        self._compute_loop = ComputeLoop(compute) if executor.options.device.type == "cpu" else None
        self._answers = ThreadPoolExecutor(1, "funitel-answers")  # idle, and without a thread, on a CPU
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
