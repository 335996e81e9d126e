"""Load a model in this process, run an engine over it on two threads, and shut all of them down."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from funitel.llm.workers.ranks import LocalRanks
from funitel.llm.workers.shards import ShardProcesses
from funitel.llm.workers.threads import CLOSED, CLOSED_EARLY, ComputeThread, LoopThread
from funitel.model_server.files.integrity import read_json
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError, NotReady
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import start
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics

T = TypeVar("T")


class LoadedModel:
    """A loaded model; it ends by `close`, by garbage collection, or with the program."""

    def __init__(
        self,
        folder: Path,
        shard: ModelServerSettings,
        router: RouterSettings,
        num_shard: int,
        environ: Mapping[str, str],
    ) -> None:
        """Load the model in `folder` on a new compute thread or in processes, and start an engine on another thread.

        Args:
            folder: of the model.
            shard: settings of the compute thread, or of each process.
            router: settings of the engine.
            num_shard: 1 for a thread; more for as many processes.
            environ: the environment that processes get.

        Raises:
            StartupError: model, settings and machine do not fit together.
        """
        self.loop = LoopThread()
        if num_shard > 1:
            self._load_shards(lambda: ShardProcesses(folder, shard, num_shard, environ), folder, router)
            return
        compute = ComputeThread()
        with ExitStack() as undo:
            # No join after an interrupt: loading goes on to its end.
            undo.push(lambda _, error, __: compute.join() if isinstance(error, FunitelError) else None)
            undo.callback(compute.close)
            undo.callback(self.loop.close, _nothing)
            engine, self.vocab_size = self.loop.run(_start(folder, shard, router, compute))
            undo.pop_all()
        self._note(engine, compute)

    def _load_shards(self, begin: Callable[[], ShardProcesses], folder: Path, router: RouterSettings) -> None:
        begun: list[ShardProcesses] = []
        with ExitStack() as undo:
            undo.callback(_close_all, begun)
            undo.callback(self.loop.join)
            undo.callback(self.loop.close, _nothing)
            engine, self.vocab_size = self.loop.run(_start_shards(begin, folder, router, begun))
            undo.pop_all()
        self._note(engine, begun[0])

    def _note(self, engine: Engine, worker: "ComputeThread | ShardProcesses") -> None:
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._finalizer = weakref.finalize(self, _shut_down, self.loop, engine, worker)

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReady once closed."""
        if self._engine is None:
            raise NotReady(CLOSED)
        return self._engine

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Run work on the engine's event loop and wait for it; raises NotReady once closed."""
        return self.loop.run(work(self.engine))

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


def _close_all(begun: list[ShardProcesses]) -> None:
    for processes in begun:
        processes.close()


async def _start_shards(
    begin: Callable[[], ShardProcesses], folder: Path, router: RouterSettings, begun: list[ShardProcesses]
) -> tuple[Engine, int]:
    """As `_start`, in processes, which are noted in `begun`; they end with this thread."""
    processes = begin()
    begun.append(processes)
    shards = await processes.connect()
    config = read_json(folder / "config.json")
    context = config.get("max_position_embeddings") or config.get("n_positions") or router.max_batch_prefill_tokens
    router = replace(router, max_batch_prefill_tokens=min(router.max_batch_prefill_tokens, context))
    return await start(shards, router, Metrics()), shards.infos[0].vocab_size


async def _nothing() -> None:
    pass


def _shut_down(loop: LoopThread, engine: Engine, worker: ComputeThread | ShardProcesses) -> None:
    """End the loop, then what computes; the garbage collector may call this on either of its threads."""

    async def close() -> None:
        engine.fail_all(NotReady(CLOSED_EARLY))  # requests that were started and are not waited for
        await engine.close()

    loop.close(close)
    loop.join()
    if isinstance(worker, ShardProcesses):
        worker.close()
    else:
        worker.join()
