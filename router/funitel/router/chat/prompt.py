"""A conversation as the prompt a model's template makes of it."""

from typing import Any

from funitel.router.chat.call import ChatCall, ChatMessage
from funitel.router.service import Service


async def render(service: Service, call: ChatCall) -> str:
    """Return the prompt; encode it without special tokens, for the template wrote them.

    Raises:
        NotReady: the tokenizer is not there yet.
        TemplateError: there is no template, or it refused the messages.
    """
    return await service.tokenizer.chat_prompt([_variables(message) for message in call.messages])


def _variables(message: ChatMessage) -> dict[str, Any]:
    """What a chat template sees of a message."""
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"role": message.role, "content": message.text} | given
