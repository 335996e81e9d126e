"""Render a conversation as a prompt by the model's template, and choose the parsers of its answer."""

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from funitel.proto.errors import InvalidRequest, ToolError
from funitel.proto.step import GrammarType, MediaKind
from funitel.router.chat.auto_grammar import Calls, Thoughts, auto_grammar
from funitel.router.chat.call import ChatCall, ChatMessage, PastToolCall, Tool, ToolMode
from funitel.router.chat.reasoning_parser import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from funitel.router.chat.tool_formats import BY_NAME, TOOL_FORMATS, ToolFormat, call_or_answer, detect_tool_format
from funitel.router.chat.tool_grammar import calls_or_answer, forced_calls
from funitel.router.core.grammar import Grammar
from funitel.router.serving.media import Prepared, prepare_media
from funitel.router.serving.prepare import NO_NAMES
from funitel.router.serving.sampling_request import BrokenRule
from funitel.router.serving.service import Service
from funitel.router.text.control_text import MediaMarkers, Spans

TOOL_PROMPT = (
    "You may call the functions above. To call one, answer with nothing but a JSON object of its name and its "
    'arguments: {"name": "...", "arguments": {...}}'
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's, and one of other families
_RESERVED = ("messages", "tools", "add_generation_prompt", "documents", "bos_token", "eos_token")
# What an answer may contain where it was not parsed, and so a message of the assistant.
_ANSWER_MARKERS = (
    *(marker for known in REASONING_FORMATS.values() if not known.has_channels for marker in known.markers),
    *(marker for known in TOOL_FORMATS if not known.has_channels for marker in known.markers),
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt, the grammar its answer must follow, and the formats to look for in it.

    `plain` are the spans of its text in which control tokens, which a client wrote, are ordinary text.
    """

    text: str
    plain: Spans = field(default_factory=list)
    media: Prepared = ()  # of which it has the text
    tools: tuple[Tool, ...] = ()  # those the model may call
    grammar: Grammar | None = None
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False  # the prompt has opened a reasoning block


async def render_prompt(service: Service, call: ChatCall, names: Mapping[str, str] = NO_NAMES) -> ChatPrompt:
    """Render a conversation. Encode the text without special tokens, for the template wrote them.

    Raises:
        NotReady: the tokenizer is not there yet.
        ToolError: tools are asked for that are not there, or together with a grammar that is no JSON schema.
        InvalidRequest: the messages and what is asked of them do not fit together.
        TemplateError: there is no template, or it refused the messages.
    """
    try:
        return await _render_prompt(service, call, names.get("inputs", "messages"))
    except BrokenRule as broken:
        raise broken.error(names) from None
    except RecursionError:
        raise InvalidRequest("`tools` or the arguments of calls are nested too deeply", "tools") from None


async def _render_prompt(service: Service, call: ChatCall, field: str) -> ChatPrompt:
    tools = _offered(call)
    template = service.tokenizer.template_source(with_tools=bool(tools))
    grammar, tool_format = await _constrained(call, tools)
    knows_tools = _knows_tools(template)
    messages = list(call.messages)
    if not knows_tools:
        messages = [_with_calls_as_text(message) for message in messages]
    if tools and (not knows_tools or call.tool_prompt is not None):
        messages = _with_tool_prompt(messages, tools, call.tool_prompt, list_tools=not knows_tools)
    media = await prepare_media(service, [source for message in messages for source in message.media])
    rendered = await service.tokenizer.chat_prompt(
        [_variables(message, template) for message in messages],
        markers=_markers(service, template),
        tools=[_tool_variables(tool) for tool in tools] if tools and knows_tools else None,
        variables=_template_variables(call, template),
        continues=_continues(call),
        add_generation_prompt=call.add_generation_prompt,
        answer_markers=_ANSWER_MARKERS,
    )
    text = rendered.text
    reasoning = _reasoning_format(service, template)
    if call.thinking_budget is not None and reasoning is None:
        raise BrokenRule(
            "thinking_budget", "`$thinking_budget` is not supported: the model's template marks no reasoning"
        )
    is_thinking = reasoning is not None and _is_thinking(reasoning, call, text)
    if reasoning is not None and (grammar is not None or call.thinking_budget == 0):  # no room for thoughts
        text = reasoning.without_thoughts(text, is_thinking=is_thinking)
        is_thinking = False
    if tools and tool_format is None:
        tool_format = _tool_format(service, template, knows_tools)
    if grammar is None:
        thoughts = None if reasoning is None else Thoughts(reasoning, is_thinking, call.thinking_budget or None)
        calls = Calls(tool_format, tools, call.allows_several_calls, template) if tool_format is not None else None
        grammar = await _auto_grammar(service, calls, thoughts)
    plain = rendered.plain
    if media and service.media is not None:
        text, plain = service.media.insert(text, plain, media, field)
    return ChatPrompt(text, plain, media, tools, grammar, tool_format, reasoning, is_thinking)


def _markers(service: Service, template: str) -> MediaMarkers | None:
    """What stands for media in a prompt; by their kinds, where the template writes nothing for them itself."""
    media = service.media
    if media is None:
        return None
    kinds = sorted(service.media_kinds)
    inline = {} if _writes_media(template) else {NOUNS_IN_TEMPLATES[kind]: media.prompt_marker(kind) for kind in kinds}
    hidden = [media.marker(kind) for kind in kinds]
    hidden += [service.tokenizer.token_text(token) for token in media.placeholders.values()]
    return MediaMarkers(tuple(dict.fromkeys(hidden)), inline)


@lru_cache(maxsize=8)
def _knows_tools(template: str) -> bool:
    """Whether a template has a variable `tools`: a search of a long one takes a millisecond."""
    return re.search(r"\btools\b", template) is not None


async def _auto_grammar(service: Service, calls: Calls | None, thoughts: Thoughts | None) -> Grammar | None:
    """The grammar of a free answer, where strict tools or a budget of thoughts ask for one."""
    is_strict = calls is not None and any(tool.strict for tool in calls.tools)
    has_budget = thoughts is not None and thoughts.budget is not None
    if service.settings.disable_grammar_support or not (is_strict or has_budget):
        return None
    markers = (*(calls.format.markers if calls else ()), *(thoughts.format.markers if thoughts else ()))
    return await asyncio.to_thread(auto_grammar, calls, thoughts, service.tokenizer.special_ids(markers))


async def _constrained(call: ChatCall, tools: tuple[Tool, ...]) -> tuple[Grammar | None, ToolFormat | None]:
    """The grammar of the answer, and the format of calls in it, which is the model's own where no grammar says it.

    Grammars are made in a thread: clients choose how large a schema is.
    """
    several = call.allows_several_calls
    if call.tool_choice.mode is ToolMode.REQUIRED:
        return await asyncio.to_thread(forced_calls, tools, parallel=several), BY_NAME["json"]
    if call.grammar is None or not tools:
        return call.grammar, None
    try:
        grammar, keys = await asyncio.to_thread(calls_or_answer, tools, call.grammar, parallel=several)
    except ValueError:
        raise BrokenRule("response_format", "the schema of the response format must be a JSON object") from None
    return grammar, call_or_answer(keys)


def _offered(call: ChatCall) -> tuple[Tool, ...]:
    """The tools the model may call; of a named one, that alone."""
    choice = call.tool_choice
    names = [tool.name for tool in call.tools]
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise ToolError(f"the name `{repeated}` is given to more than one tool", "tools")
    if choice.mode is ToolMode.NONE:
        return ()
    if choice.mode is ToolMode.REQUIRED and not call.tools:
        raise ToolError("`tool_choice` asks for a call, but there are no `tools`", "tool_choice")
    if call.tools and call.grammar is not None and call.grammar.kind is not GrammarType.JSON:
        rule = "`tools` and a response format that is no JSON schema exclude each other"
        raise BrokenRule("response_format", rule, kind=ToolError)
    if choice.name is None:
        return call.tools
    if choice.name not in names:
        raise ToolError(f"no tool is named `{choice.name}`. Given: {', '.join(names)}", "tool_choice")
    return (call.tools[names.index(choice.name)],)


def _continues(call: ChatCall) -> bool:
    """Whether the answer goes on with the last message."""
    is_begun = bool(call.messages) and call.messages[-1].role == "assistant" and not call.messages[-1].tool_calls
    if call.continue_final_message and not is_begun:
        raise InvalidRequest(
            "`continue_final_message` needs a last message of the assistant without tool calls",
            "continue_final_message",
        )
    if call.continue_final_message is None:
        return is_begun and call.add_generation_prompt is None
    return call.continue_final_message


# What the template sees


def _variables(message: ChatMessage, template: str) -> dict[str, Any]:
    name_call = _mistral_id if "[TOOL_CALLS]" in template else str
    optional = {
        "name": message.name,
        "tool_call_id": None if message.tool_call_id is None else name_call(message.tool_call_id),
        "reasoning_content": message.reasoning,
        "tool_calls": [_call_variables(call, name_call(call.id)) for call in message.tool_calls] or None,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    return {"role": role, "content": _content(message, template)} | given


NOUNS_IN_TEMPLATES = {MediaKind.IMAGE: "image", MediaKind.AUDIO: "audio"}


def _content(message: ChatMessage, template: str) -> str | list[dict[str, str]]:
    """A text, or a list of parts, as transformers documents it: of a message with media, or for a template of lists."""
    if not message.parts and not _wants_lists(template):
        return message.text
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": NOUNS_IN_TEMPLATES[part.kind]}
        for part in message.content
    ]


@lru_cache(maxsize=8)
def _writes_media(template: str) -> bool:
    """Whether a template knows parts that are media."""
    return re.search(r"""["'](image|image_url|audio|video)["']""", template) is not None


@lru_cache(maxsize=8)
def _wants_lists(template: str) -> bool:
    """Whether a template would leave out the text of a message that is no list: it takes each content for one."""
    if not _writes_media(template) or re.search(r"\bis\s+(not\s+)?(string|mapping|iterable|sequence)\b", template):
        return False
    return re.search(r"""\bin\s+\w+(\.content\b|\[["']content["']\])""", template) is not None


def _call_variables(call: PastToolCall, id: str) -> dict[str, Any]:
    """As transformers documents it: arguments are values."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": id, "type": "function", "function": function}


def _mistral_id(id: str) -> str:
    """Mistral's templates take ids of nine letters and digits only; any other always becomes the same one."""
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode()).hexdigest()[:9]


def _tool_variables(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    function["parameters"] = dict(tool.parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _template_variables(call: ChatCall, template: str) -> Mapping[str, Any]:
    reserved = next((name for name in call.template_variables if name in _RESERVED), None)
    if reserved is not None:
        raise InvalidRequest(f"`chat_template_kwargs` must not set `{reserved}`", "chat_template_kwargs")
    variables = dict(call.template_variables)
    if call.reasoning_effort is None:
        return variables
    if call.reasoning_effort not in EFFORTS:
        words = ", ".join(f"`{effort}`" for effort in EFFORTS)
        raise BrokenRule("reasoning_effort", f"`$reasoning_effort` must be one of {words}", repr(call.reasoning_effort))
    if "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", call.reasoning_effort)
    if "enable_thinking" in template:
        variables.setdefault("enable_thinking", call.reasoning_effort != "none")
    elif call.reasoning_effort != "none" and "reasoning_effort" not in template:
        raise BrokenRule("reasoning_effort", "`$reasoning_effort` is not supported: the model's template knows none")
    return variables


# Templates that know no tools


def _with_calls_as_text(message: ChatMessage) -> ChatMessage:
    """Calls of the past as the text the model is told to write."""
    calls = [
        json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in message.tool_calls
    ]
    if not calls:
        return message
    return replace(message, text="\n".join(filter(None, (message.text, *calls))), tool_calls=())


def _with_tool_prompt(
    messages: list[ChatMessage], tools: tuple[Tool, ...], prompt: str | None, *, list_tools: bool
) -> list[ChatMessage]:
    """Tell of the tools at the end of the last message of the user, or of the last of all."""
    parts = ["---"]
    if list_tools:
        parts.append(json.dumps([_tool_variables(tool) for tool in tools], ensure_ascii=False))
    parts.append(TOOL_PROMPT if prompt is None else prompt)
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    place = users[-1] if users else len(messages) - 1
    told = messages[place].followed_by("\n".join(("", *parts)))
    return [*messages[:place], told, *messages[place + 1 :]]


# How the answer is read


def _tool_format(service: Service, template: str, knows_tools: bool) -> ToolFormat:
    name = service.settings.tool_call_parser
    if name != "auto":
        return BY_NAME[name]
    return detect_tool_format(template) if knows_tools else BY_NAME["json"]


def _reasoning_format(service: Service, template: str) -> ReasoningFormat | None:
    name = service.settings.reasoning_parser
    if name == "none":
        return None
    return detect_reasoning(template) if name == "auto" else REASONING_FORMATS[name]


def _is_thinking(reasoning: ReasoningFormat, call: ChatCall, prompt: str) -> bool:
    if _continues(call):
        return reasoning.is_open_in(call.messages[-1].text)
    return reasoning.is_opened_by(prompt)
