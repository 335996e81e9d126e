"""Parse reasoning blocks: separate what a model thinks from its answer by the markers of its template."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from funitel.router.chat.harmony import CHANNEL, FINAL, START, HarmonyParser
from funitel.router.chat.harmony import MARKERS as HARMONY_MARKERS
from funitel.router.chat.output_parser import Parser, Thought, decided_length, may_begin


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    `signature` is what a template of the family contains, its closing marker by default; `special` are the markers that
    may be special tokens, opening and closing by default. `has_channels`: thoughts, calls and the answer are messages
    of their own, and one parser finds all of them.
    """

    opening: str
    closing: str
    signature: str = ""
    special: tuple[str, ...] = ()
    has_channels: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What must reach the parser even where it is a special token."""
        return self.special or (self.opening, self.closing)

    def is_known_to(self, template_source: str) -> bool:
        """Whether a template is of the family."""
        return (self.signature or self.closing) in template_source

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends within a block it has just opened, so that the answer begins with thoughts."""
        return prompt.rstrip().endswith(self.opening)

    def is_open_in(self, text: str) -> bool:
        """Whether a message that is to be continued ends within its block."""
        return text.lstrip().startswith(self.opening) and self.closing not in text

    def without_thoughts(self, prompt: str, *, is_thinking: bool) -> str:
        """A prompt of an answer without thoughts; `is_thinking`: it has opened a block."""
        if is_thinking:
            return f"{prompt.rstrip()}\n\n{self.closing}\n\n"
        begins_message = self.has_channels and prompt.rstrip().endswith(f"{START}assistant")
        return f"{prompt.rstrip()}{FINAL}" if begins_message else prompt

    def parser(self, names: Collection[str] = (), *, is_open: bool) -> Parser:
        """A parser for one answer; `names` are those of the tools that may be called, for a format with channels."""
        return HarmonyParser(names) if self.has_channels else ReasoningParser(self, is_open=is_open)


REASONING_FORMATS = {
    "harmony": ReasoningFormat(
        f"{CHANNEL}analysis", "<|end|>", signature=f"{CHANNEL}analysis", special=HARMONY_MARKERS, has_channels=True
    ),
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", special=("<|channel>", "<channel|>")),
}


def detect_reasoning(template_source: str, names: Iterable[str] = REASONING_FORMATS) -> ReasoningFormat | None:
    """Return the format with markers that a template knows."""
    formats = (REASONING_FORMATS[name] for name in names)
    return next((known for known in formats if known.is_known_to(template_source)), None)


class ReasoningParser(Parser):
    """Split the block an answer begins with from the rest. White space around the two parts belongs to neither."""

    def __init__(self, format: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the block already."""
        super().__init__()
        self._format = format
        self._is_open = is_open
        self._state = self._begin

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if not text or may_begin(text, self._format.opening):
            return False
        if text.startswith(self._format.opening):  # some models repeat what the prompt has opened
            self._drop_space()
            self._drop(len(self._format.opening))
        elif not self._is_open:
            self._state = self._plain
            return True
        self._state = self._think_first
        return True

    def _think_first(self) -> bool:
        self._drop_space()
        if self._buffer:
            self._state = self._think
        return bool(self._buffer)

    def _think(self) -> bool:
        end = self._buffer.find(self._format.closing)
        if end < 0:
            self._think_up_to(decided_length(self._buffer, (self._format.closing,)))
            return False
        self._think_up_to(len(self._buffer[:end].rstrip()))
        self._drop(self._buffer.find(self._format.closing) + len(self._format.closing))
        self._state = self._answer_first
        return True

    def _answer_first(self) -> bool:
        self._drop_space()
        if may_begin(self._buffer, self._format.closing):
            return False
        if self._buffer.startswith(self._format.closing):  # a budget closes what the model has closed
            self._drop(len(self._format.closing))
            return True
        if self._buffer:
            self._state = self._plain
        return bool(self._buffer)

    def _think_up_to(self, count: int) -> None:
        text, start = self._take(count)
        if text:
            self._out.append(Thought(text, start))

    def _end(self) -> None:
        if self._state == self._begin and self._is_open:
            self._drop_space()
        if self._state == self._think or (self._state == self._begin and self._is_open):
            self._think_up_to(len(self._buffer.rstrip()))
        elif self._state in (self._begin, self._answer_first):
            self._show(len(self._buffer))
