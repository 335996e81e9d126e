"""What the router does for a request and for a token, over a shard that answers at once."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from funitel_testing.guard.child import CountedProcess, counted, typical
from funitel_testing.guard.counted import MORE_CALLS, MORE_SYSTEM_CALLS
from funitel_testing.guard.lockstep import ROUTES, LockstepShard, listening, stream, write_model
from funitel_testing.guard.system_calls import CannotTrace
from funitel_testing.servers import free_port

WARM_TOKENS, SKIPPED, TOKENS, ALL = 4, 20, 48, 270  # whole blocks
NUM_STREAMS = 8
START_SECONDS = 60.0

Take = Callable[[], float]


class RouterMeter:
    """A running router and what is asked of it."""

    def __init__(self, router: CountedProcess, shard: LockstepShard, port: int) -> None:
        self.router = router
        self._shard = shard
        self._port = port

    async def request(self, path: str, take: Take) -> float:
        """What a request of `WARM_TOKENS` tokens adds, from a router at rest to one at rest."""
        return await typical(take, lambda: self.ask(path), 3)

    async def warm(self) -> None:
        """Have a request of each route served, so that what happens once has happened."""
        for route in ROUTES:
            await self.ask(route)

    async def ask(self, path: str) -> None:
        """Run a short request to its end."""
        self._shard.begin(WARM_TOKENS)
        await stream(self._port, path, self._shard)

    async def token(self, path: str, num_streams: int, take: Take) -> float:
        """What a token of one of several streams adds, of `TOKENS` in each, none the first or the last."""
        self._shard.begin(ALL)
        tasks: list[asyncio.Task[bytes]] = []
        for _ in range(num_streams):  # each has its first token before the next begins
            first = asyncio.Event()
            tasks.append(asyncio.create_task(stream(self._port, path, self._shard, _told(first))))
            await first.wait()
        await self._shard.advance(SKIPPED * num_streams)
        added = await typical(take, lambda: self._shard.advance(TOKENS * num_streams))
        await self._shard.run_on()
        await asyncio.gather(*tasks)
        return added / (TOKENS * num_streams)


def _told(first: asyncio.Event) -> Callable[[int], Awaitable[None]]:
    async def hear(_: int) -> None:
        first.set()

    return hear


async def is_healthy(port: int) -> bool:
    """Whether a server answers that it is ready."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    except OSError:
        return False
    return b" 200 " in answer.partition(b"\r\n")[0]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RouterMeter]:
    """A router that has served a request of each route."""
    write_model(folder)
    path, port = str(folder / "shard-0"), free_port()
    flags = f"--hostname 127.0.0.1 --port {port} --tokenizer-name {folder} --master-shard-uds-path {path}"
    async with listening(path) as shard:
        with counted(folder, "router", ["funitel.router", *flags.split()]) as router:
            async with asyncio.timeout(START_SECONDS):
                while not await is_healthy(port):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            meter = RouterMeter(router, shard, port)
            await meter.warm()
            yield meter


async def measure(folder: Path) -> dict[str, float | str]:
    """Rows of the router; of those that this machine cannot count the reason."""
    async with running(folder) as meter:
        rows: dict[str, float | str] = {"modules": meter.router.read().modules}
        rows |= await _calls(meter)
        meter.router.stop_profile()
        await meter.warm()
        return rows | await _memory(meter) | await _system_calls(meter)


async def more_a_token(folder: Path) -> dict[str, float | str]:
    """Rows of a router that makes a call more for each token, and of one that makes a system call more."""
    async with running(folder) as meter:
        meter.router.ask(MORE_CALLS)
        name = "calls a token /generate_stream"
        rows: dict[str, float | str] = {
            name: await meter.token("/generate_stream", 1, lambda: meter.router.read().calls)
        }
        meter.router.stop_profile()
        meter.router.ask(MORE_SYSTEM_CALLS)
        return rows | await _system_calls(meter)


async def _calls(meter: RouterMeter) -> dict[str, float | str]:
    def calls() -> float:
        return meter.router.read().calls

    rows: dict[str, float | str] = {}
    for route in ROUTES:
        rows[f"calls a request {route}"] = await meter.request(route, calls)
        rows[f"calls a token {route}"] = await meter.token(route, 1, calls)
    rows[f"calls a token of {NUM_STREAMS} streams"] = await meter.token("/generate_stream", NUM_STREAMS, calls)
    return rows


async def _memory(meter: RouterMeter) -> dict[str, float | str]:
    blocks = await meter.token("/generate_stream", 1, lambda: meter.router.read().blocks)
    rows: dict[str, float | str] = {"blocks kept a token": blocks}
    rows["allocations a token"] = await meter.token("/generate_stream", 1, lambda: meter.router.read().allocations)
    return rows


async def _system_calls(meter: RouterMeter) -> dict[str, float | str]:
    names = ("system calls a request", "system calls a token")
    try:
        with meter.router.system_calls() as count:

            def take() -> float:
                meter.router.wait_still()
                return count()

            found = (await meter.request("/generate_stream", take), await meter.token("/generate_stream", 1, take))
            return dict(zip(names, found, strict=True))
    except CannotTrace as error:
        return dict.fromkeys(names, str(error))


def main() -> None:
    """Entry point: a process of its own, since a router kills the process of a shard that fails it."""
    measures = {"rows": measure, "more": more_a_token}
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measures[sys.argv[1]](Path(folder)))))


if __name__ == "__main__":
    main()
