"""Render templates in sandbox processes, within limits of time and memory.

Templates come with models and messages with requests: neither is trusted. A chat that exceeds a limit is refused, and
delays no other request. Event loop only.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from funitel.proto.errors import TemplateError
from funitel.router.core import request_context
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable
from funitel.router.text.control_text import ControlText, MediaMarkers, RenderedChat

logger = logging.getLogger(__name__)

TIME_LIMIT_SECONDS = 5.0  # the longest chats take tenths of one
MEMORY_LIMIT_BYTES = 1 << 30
MAX_PROMPT_CHARACTERS = 1 << 24  # longer than any model's context
JSON_BYTES = 12  # of a character, at most
RETRY_SECONDS = 60.0  # a busy machine may be why a process did not start


@dataclass(frozen=True, slots=True)
class TemplateTexts:
    """A model's template, the one for chats with tools where it has a text of its own, and special tokens."""

    source: str
    special_tokens: Mapping[str, str]
    tool_source: str | None = None
    control: ControlText = ControlText(())  # of clients, to be told from the template's


class TemplateRenderer:
    """Makes prompts of chats as `ChatTemplate` does, within limits."""

    def __init__(
        self,
        texts: TemplateTexts,
        most: int,
        *,
        time_limit: float = TIME_LIMIT_SECONDS,
        memory_limit: int = MEMORY_LIMIT_BYTES,
        has_several_keys: bool = False,
    ) -> None:
        """Start nothing yet; at most `most` processes will render at once; of several API keys, one leaves one free."""
        self.texts = texts
        self._refusal = ""  # why the template cannot be used,
        self._refused_until = 0.0  # and how long that holds, on the monotonic clock
        described = asdict(texts)
        control = described.pop("control")
        self._pool = SandboxPool(
            "funitel.router.text.chat_template",
            {"texts": described, "control": control, "max_characters": MAX_PROMPT_CHARACTERS},
            most=most,
            time_limit=time_limit,
            memory_limit=memory_limit,
            max_answer_bytes=JSON_BYTES * MAX_PROMPT_CHARACTERS,
            has_several_keys=has_several_keys,
        )

    async def warm_up(self) -> None:
        """Have a process ready for the first chat, and log it where the template cannot be used."""
        try:
            await self._pool.warm_up()
        except WorkerUnavailable as problem:
            self._refuse(problem)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer_markers: Sequence[str] = (),
        markers: MediaMarkers | None = None,
        **options: Any,
    ) -> RenderedChat:
        """Return the prompt of a chat, with the options `ChatTemplate.render` takes.

        `answer_markers` are control tokens that messages of the assistant may contain, and `markers` those of media, as
        `HiddenChat` takes them.

        Raises:
            TemplateError: the template cannot be used, refused the messages, or took too much time or memory.
            RecursionError: the messages are nested too deeply.
        """
        if time.monotonic() < self._refused_until:
            raise TemplateError(self._refusal)
        try:
            chat = {"messages": list(messages), **options}
            task = {
                "chat": chat,
                "answer_markers": answer_markers,
                "markers": markers and asdict(markers),
                "now": request_context.drawn("now", time.time),
            }
            answer: dict[str, Any] = await self._pool.run(task, request_context.current().owner)
        except Killed as limit:
            raise TemplateError(f"{limit} to render this chat") from None
        except WorkerUnavailable as problem:
            self._refuse(problem)
            raise TemplateError(self._refusal) from None
        if "error" in answer:
            raise TemplateError(answer["error"])
        return RenderedChat(**answer)

    def _refuse(self, problem: WorkerUnavailable) -> None:
        now = time.monotonic()
        if now < self._refused_until:  # every waiting request gets here
            return
        self._refusal = str(problem)
        self._refused_until = math.inf if problem.is_final else now + RETRY_SECONDS
        logger.warning("chat is off: %s", problem)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
