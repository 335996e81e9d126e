"""Render a chat by the model's chat template, as `transformers.apply_chat_template` does.

Templates come with models and are not trusted: they run in jinja2's immutable sandbox.
Source: `transformers/utils/chat_template_utils.py` (`_compile_jinja_template`, `render_jinja_template`).
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from random import Random
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import generate_lorem_ipsum

from funitel.proto.errors import TemplateError
from funitel.router.sandbox.worker import Answer, serve
from funitel.router.text.control_text import ControlText, HiddenChat, MediaMarkers, RenderedChat

# What a template can make jinja2 and the functions it calls raise.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only encloses text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Surroundings:
    """What templates read that is not of the chat: the instant of the request, and chance that depends on it."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, now: float | None) -> None:
        """Begin to render: the same instant, in seconds since 1970, gives the same prompt. None: that of each use."""
        self._now = now
        self._chance = Random(now)

    def strftime(self, format: str) -> str:
        """The instant in the local time, as `datetime.strftime` writes it."""
        instant = datetime.now() if self._now is None else datetime.fromtimestamp(self._now)
        return instant.strftime(format)

    def pick(self, values: Sequence[Any]) -> Any:
        """Any of some values: jinja2's filter `random`, save for the source of chance."""
        return self._chance.choice(values) if values else jinja2.Undefined("there is no value to pick")

    def lipsum(self, *given: Any, **options: Any) -> Any:
        """jinja2's function of this name, save for the source of chance."""
        state = random.getstate()
        random.seed(self._chance.random())
        try:
            return generate_lorem_ipsum(*given, **options)
        finally:
            random.setstate(state)


_SURROUNDINGS = _Surroundings()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["random"] = _SURROUNDINGS.pick
    environment.globals["lipsum"] = _SURROUNDINGS.lipsum
    environment.globals["strftime_now"] = _SURROUNDINGS.strftime
    return environment


class ChatTemplate:
    """One compiled template with the special tokens it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Compile a template, and the one for chats with tools where it has a text of its own.

        Raises:
            TemplateError: a text is not a valid template.
        """
        self.source = source
        self.for_tools = self if tool_source is None else ChatTemplate(tool_source, special_tokens)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        add_generation_prompt: bool | None = None,
    ) -> str:
        """Return the prompt that asks for the next message, or that goes on with the last one.

        Args:
            messages: what was said, as the template wants it.
            tools: functions the model may call, as OpenAI describes them.
            variables: what else the template may use.
            continues: whether the last message is to be gone on with.
            add_generation_prompt: whether the next message is begun; it is by default, unless the last one goes on.

        Raises:
            TemplateError: the template refused the messages.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render(
                messages,
                tools=tools,
                variables=variables,
                continues=continues,
                add_generation_prompt=add_generation_prompt,
            )
        *earlier, last = messages
        begins = not continues if add_generation_prompt is None else add_generation_prompt
        more = {**self._special_tokens, **(variables or {}), "tools": tools}
        if not continues:
            return self._render(messages, more, begins)
        content = last["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        if not content.strip():
            return self._render(earlier, more, True)
        return _cut_after(self._render(messages, more, begins), content)

    def render_without_control(
        self,
        control: ControlText,
        chat: Mapping[str, Any],
        answer_markers: Sequence[str] = (),
        markers: MediaMarkers | None = None,
    ) -> RenderedChat:
        """Render a chat so that its control text is told from the template's; arguments as `HiddenChat` takes them.

        Raises:
            TemplateError: as `render` and `HiddenChat`.
        """
        template = self.source + self.for_tools.source
        hidden = HiddenChat(control, chat, answer_markers, template=template, markers=markers)
        try:
            return hidden.reveal(self.render(**hidden.chat))
        except TemplateError as error:
            raise TemplateError(hidden.reveal(error.message).text) from error

    def _render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                {**variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except _TEMPLATE_FAILURES as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def _cut_after(prompt: str, content: str) -> str:
    """Drop what follows the last occurrence of `content`, and white space at its end, as TGI does."""
    content = content.strip()
    start = prompt.rfind(content)
    if start < 0:
        raise TemplateError("the last message is the assistant's, but the template does not show it")
    return prompt[: start + len(content)].rstrip()


def prepare(setup: dict[str, Any]) -> Answer:
    """Compile the template; raises TemplateError if it is none."""
    template = ChatTemplate(**setup["texts"])
    control = ControlText(**{name: tuple(texts) for name, texts in setup["control"].items()})
    max_characters: int = setup["max_characters"]

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        markers = task.get("markers") and MediaMarkers(**task["markers"])
        _SURROUNDINGS.begin(task.get("now"))
        try:
            prompt = template.render_without_control(control, task["chat"], task["answer_markers"], markers)
        except TemplateError as error:
            return {"error": error.message}
        length = len(prompt.text)
        if length > max_characters:
            return {"error": f"the prompt must have at most {max_characters} characters, given {length}"}
        return asdict(prompt)

    return answer


if __name__ == "__main__":
    serve(prepare)
