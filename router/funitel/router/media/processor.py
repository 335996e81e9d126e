"""What makes items of one kind ready for the shards: the part that images and sounds have in common."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from funitel.proto.errors import InvalidRequest, Overloaded
from funitel.proto.step import MediaKind
from funitel.router.media.interface import PreparedMedia
from funitel.router.media.plan import Call
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20  # hashed in a thread


class Processor(Protocol):
    """Decodes and processes the files of one kind of media, for one model. Event loop only."""

    kind: MediaKind

    @property
    def marker(self) -> str:
        """What the chat template writes for an item, such as <image>."""

    @property
    def prompt_marker(self) -> str:
        """What a prompt without a template has for an item: the marker, and what the template writes around it."""

    @property
    def placeholder_id(self) -> int:
        """The token that takes a feature."""

    def variant(self, call: Call) -> str:
        """What of a call changes the result, as a key."""

    async def process(self, place: str, data: bytes, call: Call, owner: bytes) -> PreparedMedia:
        """Decode and process a file.

        Args:
            place: its field in the request, for errors.
            data: the bytes of the file.
            call: what the request says of it.
            owner: hash of the API key, for fairness.

        Raises:
            InvalidRequest: the file cannot be decoded, or exceeds a limit.
            Overloaded: no process can be started.
        """

    async def close(self) -> None:
        """End the processes."""


async def run(processes: SandboxPool, task: Any, place: str, data: bytes, owner: bytes, noun: str) -> tuple[Any, bytes]:
    """Let a sandbox process answer a task with a file; returns the answer and its values.

    Raises: as `Processor.process`; an answer that is a text is what is wrong with the file.
    """
    try:
        found, values = await processes.run_attached(task, data, owner)
    except Killed as limit:
        raise InvalidRequest(f"`{place}` cannot be decoded: {limit}", place) from None
    except WorkerUnavailable as problem:
        logger.warning("an item of kind %s cannot be decoded: %s", noun, problem)
        raise Overloaded(f": no process can be started to decode an item of kind {noun}", reason="media") from None
    if isinstance(found, str):
        raise InvalidRequest(f"`{place}` {found}", place)
    return found, values


async def digest(*parts: bytes) -> bytes:
    """SHA-256 of some bytes, each behind its length."""
    if sum(map(len, parts)) > LARGE_BYTES:
        return await asyncio.to_thread(_hash, parts)
    return _hash(parts)


def _hash(parts: Sequence[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
