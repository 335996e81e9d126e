"""A loaded model with its engine and the two threads they need, and the end of all four."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from funitel.llm.ranks import LocalRanks
from funitel.llm.threads import CLOSED, ComputeThread, LoopThread
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError, NotReady
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import start
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics

T = TypeVar("T")


class LoadedModel:
    """Ready when made. Ends with `close`, or when nobody has it any more, or with the program."""

    def __init__(self, folder: Path, shard: ModelServerSettings, router: RouterSettings) -> None:
        """Load the model in `folder` on a new compute thread and start an engine over it on another.

        Raises:
            StartupError: model, settings and machine do not fit together.
        """
        self._loop = LoopThread()
        compute = ComputeThread()
        try:
            engine, self.vocab_size = self._loop.run(_start(folder, shard, router, compute))
        except BaseException as error:
            self._loop.close(_nothing)
            compute.close()
            if isinstance(error, FunitelError):  # not when interrupted: loading ends by itself, nobody waits for it
                compute.join()
            raise
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, engine, compute)

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReady once closed."""
        if self._engine is None:
            raise NotReady(CLOSED)
        return self._engine

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None]) -> T:
        """Run `work` on the engine's loop; see `LoopThread.run`."""
        return self._loop.run(work, meanwhile)

    def close(self) -> None:
        """Cancel what runs, wait for a step under way and let the memory go."""
        self._finalizer()
        self._engine = None
        gc.collect()  # tasks and tracebacks of the engine form circles
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
    """End the loop, then the compute thread. A garbage collector may call this on either of them."""
    loop.close(engine.close)
    loop.join()
    compute.join()
