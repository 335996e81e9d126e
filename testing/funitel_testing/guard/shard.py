"""What a shard does for a step, and for each sequence in it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.step import CachedBatch
from funitel.proto.step_socket import OK, Frame, Method
from funitel_testing.executors import start
from funitel_testing.guard.child import CountedProcess, counted, typical
from funitel_testing.guard.system_calls import CannotTrace
from funitel_testing.step_peer import StepPeer
from funitel_testing.tiny import save_tiny

PROMPT = tuple(range(40, 48))
SKIPPED, STEPS = 8, 12  # whole blocks
NUM_SEQUENCES = 8
START_SECONDS = 60.0

Take = Callable[[], float]


class ShardMeter:
    """A running shard, and a router of its own."""

    def __init__(self, shard: CountedProcess, router: StepPeer) -> None:
        self.shard = shard
        self._router = router
        self._num_calls = self._num_steps = 0

    async def step(self, num_sequences: int, take: Take) -> float:
        """What a decode step of so many sequences adds."""
        self._num_steps = 0
        await self._call(Method.CLEAR_CACHE, b"")
        starts = [start(number, PROMPT, max_new_tokens=80) for number in range(num_sequences)]
        self._num_steps += 1
        prefill = wire.encode_prefill(wire.encode_batch(1, starts, 4), None, (), self._num_steps)
        answer = pb.PrefillResponse.FromString(await self._call(Method.PREFILL, prefill.SerializeToString()))
        batch = wire.decode_cached(answer.batch)
        await self._decode(batch, SKIPPED)
        return await typical(take, lambda: self._decode(batch, STEPS)) / STEPS

    async def _decode(self, batch: CachedBatch, num_steps: int) -> CachedBatch:
        for _ in range(num_steps):
            self._num_steps += 1
            call = wire.encode_decode([batch], (), self._num_steps).SerializeToString()
            batch = wire.decode_cached(pb.DecodeResponse.FromString(await self._call(Method.DECODE, call)).batch)
        return batch

    async def _call(self, method: Method, payload: bytes) -> bytes:
        self._num_calls += 1
        self._router.send(Frame(self._num_calls, method, payload))
        frame = await self._router.answer()
        if frame.code != OK:
            raise AssertionError(frame.payload)
        return frame.payload


async def measure(folder: Path) -> dict[str, float | str]:
    """Rows of the shard; of those that this machine cannot count the reason."""
    model, path = folder / "tiny", folder / "shard.steps"
    model.mkdir()
    save_tiny("llama", model)
    with counted(folder, "shard", ["funitel_testing.guard.step_server", str(path), str(model)]) as shard:
        async with asyncio.timeout(START_SECONDS):
            while not path.exists():
                if shard.process.poll() is not None:
                    raise RuntimeError("the shard has ended")
                await asyncio.sleep(0.05)
        _, router = await asyncio.get_running_loop().create_unix_connection(StepPeer, str(path))
        meter = ShardMeter(shard, router)
        await meter.step(NUM_SEQUENCES, lambda: 0)
        rows = await _rows(meter, "calls", lambda: shard.read().calls)
        shard.stop_profile()
        await meter.step(NUM_SEQUENCES, lambda: 0)
        rows |= await _rows(meter, "allocations", lambda: shard.read().allocations)
        try:
            with shard.system_calls() as count:

                def take() -> float:
                    shard.wait_still()
                    return count()

                rows |= await _rows(meter, "system calls", take)
        except CannotTrace as error:
            rows |= {f"system calls {what}": str(error) for what in ("a step", "a further sequence")}
        router.close()
    return rows


async def _rows(meter: ShardMeter, what: str, take: Take) -> dict[str, float | str]:
    one, many = await meter.step(1, take), await meter.step(NUM_SEQUENCES, take)
    further = (many - one) / (NUM_SEQUENCES - 1)
    return {f"{what} a step": one, f"{what} a further sequence": further}
