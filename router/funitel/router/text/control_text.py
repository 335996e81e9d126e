"""Hide what clients write as control tokens while a chat is rendered, and tell where it stands in the prompt.

A chat template writes control tokens as text, and so can a client. While the template runs, each such text of a client
is one private-use character; in the prompt the text is back, and its spans are encoded as ordinary text
(`control_tokens`). Runs in the sandbox process of the template. Pure.
"""

import json
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from funitel.proto.errors import TemplateError

Spans = list[tuple[int, int]]  # of a text, in characters; in order, none in another

# Of messages: OpenAI's, then what templates of Llama 3, GLM and Granite call results of tools and documents. A template
# writes them between control tokens.
ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "environment", "document"),
)
_PRIVATE_USE = range(0xE000, 0xF900)
MAX_SPANS = 16_384  # of a chat; each costs microseconds outside the sandbox
_MAX_BEGINNING = 64  # characters of a token that a client may leave for the template to complete
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_SPOKEN = ("content", "reasoning_content")  # the fields of a message that its role may fill with the model's notation


@dataclass(frozen=True, slots=True)
class ControlText:
    """Texts that a tokenizer reads as control tokens.

    `structure` divides messages from each other and is hidden in all that a client sends, `notation` is what a model
    writes within a message (`<think>`, `<tool_call>`): instructions may explain it, and earlier answers contain it.
    """

    structure: tuple[str, ...]
    notation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat, and the spans of it that are ordinary text, whatever they spell."""

    text: str
    plain: Spans


@dataclass(frozen=True, slots=True)
class MediaMarkers:
    """What stands for images and sounds in prompts.

    `hidden` are the texts that templates write for them, ordinary text where a client writes them. `inline` are written
    in their places, by the type of a part, where a template takes each content for a text.
    """

    hidden: tuple[str, ...] = ()
    inline: Mapping[str, str] = field(default_factory=dict)


class HiddenChat:
    """A chat without control text, and the way back: `reveal` for what the template made of `chat`."""

    def __init__(
        self,
        control: ControlText,
        chat: Mapping[str, Any],
        answer_markers: Sequence[str] = (),
        *,
        template: str = "",
        markers: MediaMarkers | None = None,
    ) -> None:
        """Hide the control text of a chat.

        Args:
            control: what to hide.
            chat: the arguments of `ChatTemplate.render`.
            answer_markers: structure that answers of this model may contain, and messages of the assistant too.
            template: its source; characters of it are not used to hide text.
            markers: of media, where the chat has some.

        Raises:
            TemplateError: the chat uses all private-use characters, or is nested too deeply.
        """
        self._inline = {} if markers is None else markers.inline
        if markers is not None:
            control = ControlText((*control.structure, *markers.hidden), control.notation)
        self._marks: dict[str, str] = {}  # what stands for a text
        self._free = _free_characters(chat, template)
        self._anywhere = _pattern((*control.structure, *control.notation))
        answers = tuple(text for text in control.structure if text not in answer_markers)
        instructions = _pattern(control.structure)
        self._by_role = {"system": instructions, "developer": instructions, "assistant": _pattern(answers)}
        try:
            self.chat = {name: self._hidden(value) for name, value in chat.items() if name != "messages"}
            self.chat["messages"] = [self._message(message) for message in chat["messages"]]
        except RecursionError:
            raise TemplateError("the messages, tools or variables are nested too deeply") from None

    def reveal(self, text: str) -> RenderedChat:
        """Put the control text back; a template may have written a character as JSON or Python escape it.

        Raises:
            TemplateError: there are more than `MAX_SPANS` spans.
        """
        if not self._marks:
            return RenderedChat(text, [])
        texts = {mark: original for original, mark in self._marks.items()}
        texts |= {f"\\u{ord(mark):04x}": original for original, mark in self._marks.items()}
        pieces: list[str] = []
        spans: Spans = []
        length = end = 0
        for found in re.finditer("|".join(map(re.escape, texts)), text):
            before, original = text[end : found.start()], texts[found[0]]
            start = length + len(before)
            length, end = start + len(original), found.end()
            pieces += (before, original)
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            elif len(spans) == MAX_SPANS:
                raise TemplateError(f"the texts of the chat must have at most {MAX_SPANS} control tokens")
            spans.append((start, length))
        return RenderedChat("".join((*pieces, text[end:])), spans)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        spoken = self._by_role.get(message["role"], self._anywhere)
        hidden = {
            name: value if name == "role" else self._hidden(value, spoken if name in _SPOKEN else None)
            for name, value in message.items()
            if name != "content" or isinstance(value, str)
        }
        if "content" not in hidden and "content" in message:
            hidden["content"] = self._parts(message["content"], spoken)
        return hidden

    def _parts(self, content: Sequence[Mapping[str, str]], spoken: re.Pattern[str]) -> Any:
        """The parts of a content without the control text; as one text, where media are written inline."""
        parts = [dict(part, text=self._hidden(part["text"], spoken)) if "text" in part else part for part in content]
        if self._inline:
            return "".join(part["text"] if "text" in part else self._inline[part["type"]] for part in parts)
        return parts

    def _hidden(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        """A value without the control text in its strings and its keys."""
        if isinstance(value, str):
            return (pattern or self._anywhere).sub(self._mark, value)
        if isinstance(value, list):
            return [self._hidden(item, pattern) for item in value]
        if isinstance(value, dict):
            return {self._hidden(key, pattern): self._hidden(item, pattern) for key, item in value.items()}
        return value

    def _mark(self, found: re.Match[str]) -> str:
        text = found[0]
        if text not in self._marks:
            mark = next(self._free, None)
            if mark is None:
                raise TemplateError("the chat has control tokens and all private-use characters in its texts")
            self._marks[text] = mark
        return self._marks[text]


def _free_characters(chat: Mapping[str, Any], template: str) -> Iterator[str]:
    """Private-use characters that neither a chat nor a template has, themselves or escaped; found when asked for."""
    text = json.dumps(chat, ensure_ascii=False) + template
    taken = set(text) | {chr(int(digits, 16)) for digits in _ESCAPE.findall(text)}
    yield from (mark for mark in map(chr, _PRIVATE_USE) if mark not in taken)


@lru_cache(maxsize=16)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Find any of some texts, or the beginning of one at the end of a string: what follows could complete it."""
    return re.compile(_any_of(texts, _MAX_BEGINNING))


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Find any of some texts, the longest where several begin."""
    return re.compile(_any_of(texts, 0))


def _any_of(texts: Iterable[str], beginnings: int) -> str:
    """An expression that shares common beginnings, so that many texts are found as fast as few.

    `beginnings`: characters after which the end of the string stands for the rest; white space may come before the end.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    is_whole = by_first.pop("", None) is not None
    branches = [re.escape(first) + _rest(rests, beginnings) for first, rests in by_first.items()]
    if is_whole:
        branches.append("")
    if not branches:
        return r"(?!)"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _rest(texts: Sequence[str], beginnings: int) -> str:
    if beginnings <= 0:
        common = os.path.commonprefix(texts)
        return re.escape(common) + _any_of([text[len(common) :] for text in texts], 0)
    rest = _any_of(texts, beginnings - 1)
    return rest if "" in texts else rf"(?:{rest}|(?=\s*\Z))"
