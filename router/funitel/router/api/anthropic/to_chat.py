"""Convert an Anthropic request to a `ChatCall` of the chat core."""

import json
from collections.abc import Iterator

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GrammarType, MediaKind
from funitel.router.api.anthropic.schema_request import (
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
)
from funitel.router.api.anthropic.schema_request import Tool as BodyTool
from funitel.router.chat.call import ChatCall, ChatMessage, ContentPart, PastToolCall, Tool, ToolChoice, ToolMode
from funitel.router.core.grammar import Grammar
from funitel.router.media.interface import MediaSource
from funitel.router.serving.sampling_request import SamplingRequest


def chat_call(body: CountTokensRequest, sampling: SamplingRequest | None = None) -> ChatCall:
    """The conversation of a request, and how to go on.

    Raises:
        InvalidRequest: blocks stand where they cannot, or calls of tools lack their results.
    """
    named = _named_tools(body)
    shown = [tool for tool in body.tools or () if not tool.defer_loading or tool.name in named]
    tools = tuple(_tool(tool) for tool in shown)
    if body.tool_choice is not None and not body.tools:
        raise InvalidRequest("`tool_choice` needs `tools`", "tool_choice")
    return ChatCall(
        messages=tuple(_merged(_conversation(body))),
        tools=tools,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", False),
        grammar=_grammar(body),
        sampling=sampling or SamplingRequest(),
        thinking_budget=_thinking_budget(body),
        template_variables={"enable_thinking": isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive)},
    )


def sampling_of(body: MessagesRequest) -> SamplingRequest:
    """How tokens are chosen and when they end.

    Raises:
        InvalidRequest: more tokens to think with than to answer.
    """
    if isinstance(body.thinking, ThinkingEnabled) and body.thinking.budget_tokens >= body.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens: must be less than `max_tokens` {body.max_tokens}. "
            f"Given: {body.thinking.budget_tokens}",
            "thinking.budget_tokens",
        )
    return SamplingRequest(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        max_new_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        model=body.model,
    )


def _thinking_budget(body: CountTokensRequest) -> int | None:
    """Tokens to think with, where an answer is asked for."""
    if isinstance(body, MessagesRequest) and isinstance(body.thinking, ThinkingEnabled):
        return body.thinking.budget_tokens
    return None


def _grammar(body: CountTokensRequest) -> Grammar | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return Grammar(GrammarType.JSON, json.dumps(body.output_config.format.schema_, ensure_ascii=False))


def _tool(tool: BodyTool) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))


def _named_tools(body: CountTokensRequest) -> set[str]:
    """The tools that a request refers to: found by a search, called before, or chosen."""
    names = {body.tool_choice.name} if isinstance(body.tool_choice, ToolChoiceTool) else set()
    for block in (block for message in body.messages for block in message.content):
        if isinstance(block, ToolUseBlock):
            names.add(block.name)
        elif isinstance(block, ToolResultBlock):
            names |= {part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock)}
    return names


def _tool_choice(body: CountTokensRequest) -> ToolChoice:
    match body.tool_choice:
        case ToolChoiceTool(name=name):
            return ToolChoice.named(name)
        case ToolChoiceAny():
            return ToolChoice(ToolMode.REQUIRED)
        case ToolChoiceNone():
            return ToolChoice(ToolMode.NONE)
        case _:
            return ToolChoice()


# Messages


def _conversation(body: CountTokensRequest) -> Iterator[ChatMessage]:
    if body.system:
        yield ChatMessage(role="system", text=joined(body.system))
    calls: dict[str, str] = {}  # of the message before, by id
    for place, message in enumerate(body.messages):
        _check_content(body, place)
        if message.role == "assistant":
            _check_answered(calls, place - 1)
            calls = {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            yield _assistant_message(message)
        else:
            yield from _user_messages(message, place, calls)
            answered = {block.tool_use_id for block in message.content if isinstance(block, ToolResultBlock)}
            _check_answered({id: name for id, name in calls.items() if id not in answered}, place - 1)
            calls = {}
    _check_answered(calls, len(body.messages) - 1)


_SPEAKERS = {ToolUseBlock: "assistant", ThinkingBlock: "assistant", ToolResultBlock: "user", ImageBlock: "user"}


def _check_content(body: CountTokensRequest, place: int) -> None:
    message = body.messages[place]
    may_be_empty = message.role == "assistant" and place == len(body.messages) - 1
    is_empty = all(isinstance(block, TextBlock) and not block.text for block in message.content)
    if is_empty and not may_be_empty:
        param = f"messages.{place}.content"
        raise InvalidRequest(f"{param}: cannot be empty, save in a last message that is the assistant's", param)
    for number, block in enumerate(message.content):
        speaker = _SPEAKERS.get(type(block), message.role)
        if message.role != speaker:
            param = f"messages.{place}.content.{number}"
            raise InvalidRequest(f"{param}: type `{block.type}` belongs into a message with role `{speaker}`", param)


def _check_answered(calls: dict[str, str], place: int) -> None:
    if calls:
        param = f"messages.{place}.content"
        missing = ", ".join(f"`{id}`" for id in calls)
        raise InvalidRequest(f"{param}: each tool_use must have its tool_result in the next message: {missing}", param)


def _assistant_message(message: InputMessage) -> ChatMessage:
    blocks = message.content
    return ChatMessage(
        role="assistant",
        text="".join(block.text for block in blocks if isinstance(block, TextBlock)),
        reasoning="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None,
        tool_calls=tuple(
            PastToolCall(id=block.id, name=block.name, arguments=block.input)
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ),
    )


def _user_messages(message: InputMessage, place: int, calls: dict[str, str]) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, in the order of the blocks."""
    for number, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            yield ChatMessage(role=message.role, text=block.text)
        elif isinstance(block, ImageBlock):
            yield ChatMessage.of_parts(message.role, [_image(block, f"messages.{place}.content.{number}")])
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in calls:
                param = f"messages.{place}.content.{number}.tool_use_id"
                raise InvalidRequest(
                    f"{param}: no tool_use of the message before has this id. Given: {block.tool_use_id!r}", param
                )
            name = calls[block.tool_use_id]
            yield _result(block, f"messages.{place}.content.{number}", name)


def _image(block: ImageBlock, place: str) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, f"{place}.source", block.url)


def _result(block: ToolResultBlock, place: str, name: str) -> ChatMessage:
    """The result of a call as the model reads it; a failure says that it is one."""
    parts: list[ContentPart] = [
        _image(part, f"{place}.content.{number}") if isinstance(part, ImageBlock) else part.text
        for number, part in enumerate(block.content)
    ]
    if block.is_error:
        first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        parts.insert(0, f"Error: {first}")
    return ChatMessage.of_parts("tool", parts, "\n", tool_call_id=block.tool_use_id, name=name)


def _merged(messages: Iterator[ChatMessage]) -> Iterator[ChatMessage]:
    """Messages of one speaker that follow each other are one, as with Anthropic; many templates ask for turns."""
    last: ChatMessage | None = None
    for message in messages:
        if last is not None and last.role == message.role and message.role != "tool":
            last = _one(last, message)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _one(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    if first.role != "assistant":
        parts = [part for message in (first, second) for part in message.content]
        return ChatMessage.of_parts(first.role, parts, "\n")
    return ChatMessage(
        role="assistant",
        text=first.text + second.text,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )
