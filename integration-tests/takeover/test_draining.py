"""The router is killed while the launcher drains: every request that it has accepted gets its whole answer."""

import asyncio
import os
import signal
from pathlib import Path

from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.servers import marked, serving
from funitel_testing.takeovers.asks import ASKS
from funitel_testing.takeovers.load import Comparison, report, undisturbed
from funitel_testing.takeovers.raw import RawAnswer, RawConnection

NUM_CLIENTS, NUM_TOKENS = 15, 400
BEFORE_SECONDS = 0.5  # until all requests were accepted


async def asked(port: int, number: int) -> RawAnswer:
    """The answer to one request on a connection of its own."""
    connection = await RawConnection.to(port)
    await connection.send(ASKS[number % len(ASKS)].request(number, NUM_TOKENS))
    answer = await connection.answer()
    await connection.close()
    answer.head = answer.head.replace(b"connection: close\r\n", b"")
    return answer


def test_another_router_finishes_the_streams(tmp_path: Path) -> None:
    flags = ("--model-id", str(save_endless(tmp_path / "model")), *LIMITS, *ALIKE)
    with serving(tmp_path, *flags) as server:
        known = asyncio.run(undisturbed(server.port, NUM_CLIENTS, NUM_TOKENS))

        async def drained() -> list[RawAnswer]:
            asks = [asyncio.create_task(asked(server.port, number)) for number in range(NUM_CLIENTS)]
            await asyncio.sleep(BEFORE_SECONDS)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_log, "draining requests=")
            os.kill(server.router_pid(), signal.SIGKILL)
            return await asyncio.gather(*asks)

        comparison = Comparison()
        for number, answer in enumerate(asyncio.run(drained())):
            kind = ASKS[number % len(ASKS)]
            comparison.take(kind, number, answer, known[kind.name, number])
        print(report(comparison))
        assert not comparison.problems, report(comparison)
        server.wait_log("another router takes over, to finish its requests")
        assert server.process.wait(60) == 0
        assert not marked(server.mark)
