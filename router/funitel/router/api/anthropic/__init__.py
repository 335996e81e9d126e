"""The Anthropic Messages API."""

from funitel.router.api.anthropic import handlers
from funitel.router.api.anthropic.schema_request import CountTokensRequest, MessagesRequest
from funitel.router.api.anthropic.schema_response import MessageAnswer, MessageEvent, TokenCount
from funitel.router.api.common.route_kinds import anthropic_work

ROUTES = (
    anthropic_work(
        "/v1/messages",
        handlers.messages,
        "Answer a conversation, in Anthropic's words; streamed if `stream` is true",
        MessagesRequest,
        MessageAnswer,
        event=MessageEvent,
    ),
    anthropic_work(
        "/v1/messages/count_tokens",
        handlers.count_tokens,
        "Count the tokens of a conversation, in Anthropic's words",
        CountTokensRequest,
        TokenCount,
    ),
)
