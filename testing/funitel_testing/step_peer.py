"""The router's end of a shard's step socket."""

import asyncio

from funitel.proto.step_socket import Frame, FrameProtocol


class StepPeer(FrameProtocol):
    """Keeps answers in the order they come; a test says what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: asyncio.Queue[Frame] = asyncio.Queue()
        self.lost = asyncio.Event()

    def take(self, frame: Frame) -> None:
        self.answers.put_nowait(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()

    async def answer(self) -> Frame:
        return await asyncio.wait_for(self.answers.get(), 10)
