"""Convert a request of OpenAI's Responses API to a `ChatCall` of the chat core."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from funitel.proto.errors import InvalidRequest, PayloadTooLarge
from funitel.proto.step import GrammarType, MediaKind
from funitel.router.api.common.schema_base import json_object
from funitel.router.api.responses.builder import new_id
from funitel.router.api.responses.schema_request import (
    AllowedToolsChoice,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionChoice,
    FunctionTool,
    InputImage,
    InputTokensRequest,
    Item,
    ItemReference,
    MessageItem,
    ModeChoice,
    NamespaceTool,
    ObjectFormat,
    Part,
    PlainFormat,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)
from funitel.router.api.responses.store import ResponseStore, StoredItem
from funitel.router.chat.call import (
    ChatCall,
    ChatMessage,
    ContentPart,
    PastToolCall,
    Tool,
    ToolChoice,
    ToolMode,
    check_role_of_media,
)
from funitel.router.core import request_context
from funitel.router.core.grammar import Grammar
from funitel.router.media.interface import MediaSource
from funitel.router.serving.sampling_request import SamplingRequest

ANY_OBJECT = '{"type": "object"}'
_DETAILS = {"original": "high"}  # as finely as the model can
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def conversation(
    body: InputTokensRequest, store: ResponseStore, owner: bytes = b"", *, max_stored_bytes: int
) -> tuple[Item, ...]:
    """All items a request goes on from, each with an id; those of earlier responses first.

    Args:
        body: names stored items beside those that it has.
        store: of the responses.
        owner: of the request.
        max_stored_bytes: maximum of stored items in bytes of JSON; one that is named twice counts twice.

    Raises:
        InvalidRequest: it names a response or an item that is not stored.
        PayloadTooLarge: it names too many bytes.
    """
    earlier: tuple[Item, ...] = ()
    room = max_stored_bytes
    if body.previous_response_id is not None:
        stored = store.get(body.previous_response_id, owner)
        if stored is None:
            raise InvalidRequest(
                f"previous_response_id: no such response is stored. Given: {body.previous_response_id!r}",
                "previous_response_id",
            )
        if not stored.response.has_ended:
            raise InvalidRequest(
                f"previous_response_id: the response has not ended. Given: {body.previous_response_id!r}",
                "previous_response_id",
            )
        earlier = stored.conversation
        room -= stored.num_bytes
    items: list[Item] = []
    for place, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            found = _referred(item, place, store, owner)
            room -= found.num_bytes
            items.append(found.item)
        else:
            items.append(item if item.id else item.model_copy(update={"id": _id_for(item)}))
        if room < 0:
            words = f"input: the stored items that it names must have at most {max_stored_bytes} bytes together"
            raise PayloadTooLarge(words, "input")
    return (*earlier, *items)


def _id_for(item: Item) -> str:
    return request_context.current().journal.draw_next("given", lambda: new_id(_PREFIXES[item.type]))


def _referred(reference: ItemReference, place: int, store: ResponseStore, owner: bytes) -> StoredItem:
    found = store.item(reference.id, owner)
    if found is None:
        param = f"input.{place}.id"
        raise InvalidRequest(f"{param}: no such item is stored. Given: {reference.id!r}", param)
    return found


def chat_call(body: InputTokensRequest, items: Sequence[Item]) -> ChatCall:
    """The conversation of a request, and how to go on.

    Raises:
        InvalidRequest: items do not fit together, or tools are chosen that are not there.
    """
    sampling = sampling_of(body) if isinstance(body, ResponsesRequest) else SamplingRequest()
    tools, choice = _tools(body)
    return ChatCall(
        messages=tuple(_messages(body.instructions, items, first=len(items) - len(body.input))),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=_grammar(body),
        sampling=sampling,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        template_variables={"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {},
    )


def sampling_of(body: ResponsesRequest) -> SamplingRequest:
    """How tokens are chosen and when they end.

    Raises:
        InvalidRequest: likeliest tokens are asked for without log-probabilities.
    """
    if body.top_logprobs and not body.wants_logprobs:
        raise InvalidRequest("`top_logprobs` needs `message.output_text.logprobs` in `include`", "top_logprobs")
    return SamplingRequest(
        temperature=body.temperature,
        top_p=body.top_p,
        max_new_tokens=body.max_output_tokens,
        top_n_tokens=(body.top_logprobs or 0) if body.wants_logprobs else None,
        raw_logprobs=body.wants_logprobs,
        model=body.model,
    )


# Tools and formats


def _tools(body: InputTokensRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tuple(_shown_tools(body))
    match body.tool_choice:
        case ModeChoice(type=mode):
            return tools, ToolChoice(ToolMode(mode))
        case FunctionChoice(name=name):
            return tools, ToolChoice.named(name)
        case AllowedToolsChoice(mode=mode, tools=allowed):
            names = {tool.name for tool in tools}
            for place, choice in enumerate(allowed):
                if choice.name not in names:
                    param = f"tool_choice.tools.{place}.name"
                    raise InvalidRequest(f"{param}: no tool has this name. Given: {choice.name!r}", param)
            wanted = {choice.name for choice in allowed}
            return tuple(tool for tool in tools if tool.name in wanted), ToolChoice(ToolMode(mode))
        case None:
            return tools, ToolChoice()


def _shown_tools(body: InputTokensRequest) -> Iterator[Tool]:
    """The functions that the model is shown; those of namespaces by their qualified names."""
    for tool in body.tools or ():
        match tool:
            case FunctionTool():
                yield Tool(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
                )
            case NamespaceTool(name=namespace, description=words, tools=functions):
                for each in functions:
                    description = "\n".join(filter(None, (words, each.description))) or None
                    name = qualified(namespace, each.name)
                    yield Tool(name=name, description=description, parameters=each.parameters, strict=bool(each.strict))


def qualified(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def namespaces(body: InputTokensRequest) -> dict[str, tuple[str, str]]:
    """Namespace and name of the functions that have a namespace, by qualified names."""
    groups = [tool for tool in body.tools or () if isinstance(tool, NamespaceTool)]
    return {qualified(group.name, each.name): (group.name, each.name) for group in groups for each in group.tools}


def _grammar(body: InputTokensRequest) -> Grammar | None:
    match body.text.format if body.text else None:
        case SchemaFormat(schema_=schema):
            return Grammar(GrammarType.JSON, json.dumps(schema, ensure_ascii=False))
        case ObjectFormat():
            return Grammar(GrammarType.JSON, ANY_OBJECT)
        case PlainFormat() | None:
            return None


# Messages


def _messages(instructions: str | None, items: Sequence[Item], first: int) -> Iterator[ChatMessage]:
    """Messages of instructions and items. Items from `first` on are the request's own; errors count from there."""
    gathered: ChatMessage | None = ChatMessage(role="system", text=instructions) if instructions else None
    calls: dict[str, str] = {}  # names, by id
    unanswered: dict[str, int] = {}  # places, by id
    for place, item in enumerate(items, start=-first):
        if isinstance(item, FunctionCallItem):
            calls[item.call_id] = qualified(item.namespace, item.name)
            unanswered[item.call_id] = place
        elif isinstance(item, FunctionCallOutputItem):
            if item.call_id not in calls:
                param = f"input.{place}.call_id"
                raise InvalidRequest(f"{param}: no function_call has this id. Given: {item.call_id!r}", param)
            unanswered.pop(item.call_id, None)
        message = _message(item, place, calls)
        joined = None if gathered is None else _joined(gathered, message)
        if joined is None and gathered is not None:
            yield gathered
        gathered = joined or message
    if unanswered:
        missing = ", ".join(f"`{id}`" for id in unanswered)
        raise InvalidRequest(f"input: each function_call must have its function_call_output: {missing}", "input")
    if gathered is not None:
        yield gathered


def _message(item: Item, place: int, calls: Mapping[str, str]) -> ChatMessage:
    match item:
        case MessageItem():
            parts = _content(item.content, place, "content")
            check_role_of_media(item.role, parts)
            return ChatMessage.of_parts(item.role, parts, "" if item.role == "assistant" else "\n")
        case ReasoningItem():
            return ChatMessage(role="assistant", reasoning=item.text)
        case FunctionCallItem():
            name = qualified(item.namespace, item.name)
            call = PastToolCall(id=item.call_id, name=name, arguments=_arguments(item, place))
            return ChatMessage(role="assistant", tool_calls=(call,))
        case FunctionCallOutputItem():
            parts = _content(item.output, place, "output")
            name = calls[item.call_id]
            return ChatMessage.of_parts("tool", parts, "\n", tool_call_id=item.call_id, name=name)


def _content(parts: Sequence[Part], item: int, field: str) -> list[ContentPart]:
    """The texts and images in a field of an item, which has a number in the request, or is stored."""
    stored = "previous_response_id" if item < 0 else ""
    return [
        _image(part, stored or f"input.{item}.{field}.{number}.image_url")
        if isinstance(part, InputImage)
        else part.text
        for number, part in enumerate(parts)
    ]


def _image(part: InputImage, place: str) -> MediaSource:
    detail = part.detail or ""
    return MediaSource(MediaKind.IMAGE, place, part.image_url, detail=_DETAILS.get(detail, detail))


def _arguments(item: FunctionCallItem, place: int) -> dict[str, Any]:
    try:
        return json_object(item.arguments)
    except ValueError as error:
        param = f"input.{place}.arguments"
        raise InvalidRequest(f"{param}: {error}", param) from None


_INSTRUCTING = ("system", "developer")


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage | None:
    """Two items that are one message: what the assistant thought, said and called; what it is told to be."""
    if first.role in _INSTRUCTING and second.role in _INSTRUCTING:
        return replace(first, text=f"{first.text}\n{second.text}")
    if first.role != "assistant" or second.role != "assistant":
        return None
    if second.reasoning is not None and (first.text or first.tool_calls):
        return None
    if second.text and first.tool_calls:
        return None
    return replace(
        first,
        text=first.text + second.text,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )
