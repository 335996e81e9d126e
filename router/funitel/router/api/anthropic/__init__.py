"""The Anthropic Messages API."""

from funitel.router.api.anthropic import handlers
from funitel.router.api.anthropic.schema_request import CountTokensRequest, MessagesRequest
from funitel.router.api.anthropic.schema_response import MessageAnswer, MessageEvent, TokenCount
from funitel.router.api.common.route_kinds import anthropic_work

ROUTES = (
    anthropic_work(
        path="/v1/messages",
        handler=handlers.messages,
        summary="Answer a conversation, in Anthropic's words; streamed if `stream` is true",
        body=MessagesRequest,
        answer=MessageAnswer,
        event=MessageEvent,
    ),
    anthropic_work(
        path="/v1/messages/count_tokens",
        handler=handlers.count_tokens,
        summary="Count the tokens of a conversation, in Anthropic's words",
        body=CountTokensRequest,
        answer=TokenCount,
    ),
)
