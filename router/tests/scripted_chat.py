"""A scripted engine on OpenAI's chat route, and a chat template with tools."""

from typing import Any

import httpx
from fakes import FakeEngine

from funitel.router.core.request import Limits

CHAT = "/v1/chat/completions"
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
WIDE = Limits(max_input_tokens=4000, max_total_tokens=5000, pool_tokens=9000)
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def writes(text: str, length: int = 3) -> FakeEngine:
    """An engine whose model writes a text, so many characters a token."""
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    return FakeEngine(pieces=pieces, limits=WIDE)


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}]} | fields


async def whole(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CHAT, json=ask(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]
