"""What the tests of the console do with a page."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

MODEL = "assistant"
OpenPage = Callable[..., "Page"]
COMPLETIONS = "**/v1/chat/completions"


def ask(page: "Page", text: str) -> None:
    """Send a message in a chat."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def set_most_tokens(page: "Page", count: int) -> None:
    """Open the settings of a chat and bound its answers."""
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Max tokens").fill(str(count))


def chunk(delta: dict[str, Any], **more: Any) -> str:
    """One event of a streamed chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
    return f"data: {json.dumps({'id': 'x', 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


def say(page: "Page", *chunks: str) -> None:
    """Let the page have this answer in place of the server's."""

    def fulfill(route: "Route") -> None:
        route.fulfill(status=200, content_type="text/event-stream", body="".join(chunks) + "data: [DONE]\n\n")

    page.route(COMPLETIONS, fulfill)
