"""Load a model in this process, run an engine over it on two threads, and shut all of them down."""

import asyncio
import gc
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from funitel.llm.ranks import LocalRanks
from funitel.llm.threads import CLOSED, CLOSED_EARLY, ComputeThread, LoopThread
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError, NotReady
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import start
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


class LoadedModel:
    """A loaded model; it ends by `close`, by garbage collection, or with the program."""

    def __init__(self, folder: Path, shard: ModelServerSettings, router: RouterSettings) -> None:
        """Load the model in `folder` on a new compute thread, and start an engine on another.

        Raises:
            StartupError: model, settings and machine do not fit together.
        """
        self.loop = LoopThread()
        compute = ComputeThread()
        with ExitStack() as undo:
            # No join after an interrupt: loading goes on to its end.
            undo.push(lambda _, error, __: compute.join() if isinstance(error, FunitelError) else None)
            undo.callback(compute.close)
            undo.callback(self.loop.close, _nothing)
            engine, self.vocab_size = self.loop.run(_start(folder, shard, router, compute))
            undo.pop_all()
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._finalizer = weakref.finalize(self, _shut_down, self.loop, engine, compute)

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReady once closed."""
        if self._engine is None:
            raise NotReady(CLOSED)
        return self._engine

    def close(self) -> None:
        """Cancel running calls, wait for the step in flight and free the memory."""
        self._finalizer()
        self._engine = None
        gc.collect()  # tasks and tracebacks of the engine form reference cycles
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


async def _start(
    folder: Path, shard: ModelServerSettings, router: RouterSettings, compute: ComputeThread
) -> tuple[Engine, int]:
    """The engine and the size of the vocabulary."""
    executor, info = await asyncio.wrap_future(compute.submit(lambda: load_generator(shard, folder)))
    context = executor.spec.max_position_embeddings
    router = replace(router, max_batch_prefill_tokens=min(router.max_batch_prefill_tokens, context))
    return await start(LocalRanks(executor, info, compute), router, Metrics()), executor.spec.vocab_size


async def _nothing() -> None:
    pass


def _shut_down(loop: LoopThread, engine: Engine, compute: ComputeThread) -> None:
    """End the loop, then the compute thread; the garbage collector may call this on either."""

    async def close() -> None:
        engine.fail_all(NotReady(CLOSED_EARLY))  # requests that were started and are not waited for
        await engine.close()

    loop.close(close)
    loop.join()
    compute.join()
